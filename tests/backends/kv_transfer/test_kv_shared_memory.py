"""Shared KV memory and the copies into it: exactly the named slots, no descriptor and no map left."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import Copy, some_copies

from backends.kv_transfer.intervals import covered_seconds, overlapped_seconds
from backends.kv_transfer.runs import Run, runs
from backends.kv_transfer.shared_memory import CacheBytes, SharedKVMemory, SharedMemoryConnector

NUM_LAYERS, BLOCK_SIZE, SLOT_BYTES = 2, 4, 3


def make_source(num_blocks: int) -> CacheBytes:
    shape = (NUM_LAYERS, 2, num_blocks, BLOCK_SIZE * SLOT_BYTES)
    return np.random.default_rng(0).integers(1, 255, size=shape, dtype=np.uint8)


def target_view(memory: SharedKVMemory) -> CacheBytes:
    return np.frombuffer(memory.buffer, dtype=np.uint8).reshape(NUM_LAYERS, 2, -1, BLOCK_SIZE * SLOT_BYTES)


def slots(cache: CacheBytes, layer: int, block_ids: list[int], start: int, stop: int) -> CacheBytes:
    """K and V of tokens [start, stop): [2, stop - start, bytes]."""
    table = cache[layer][:, block_ids].reshape(2, -1, SLOT_BYTES)
    return table[:, start:stop]


def num_open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def num_kv_maps() -> int:
    with open("/proc/self/maps") as maps:
        return sum("kvgate-kv" in line for line in maps)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(copy=some_copies())
def test_a_copy_moves_exactly_the_named_slots(copy: Copy):
    source_ids, target_ids, start, stop = copy
    source = make_source(12)
    memory = SharedKVMemory.create(NUM_LAYERS * 2 * 10 * BLOCK_SIZE * SLOT_BYTES)
    connector = SharedMemoryConnector(source, memory, block_size=BLOCK_SIZE)

    num_bytes = connector.save_kv_layer(1, source_ids, target_ids, start, stop)

    target = target_view(memory).copy()
    connector.close()
    expected = np.zeros_like(target)
    table = expected[1][:, target_ids].reshape(2, -1, SLOT_BYTES)
    table[:, start:stop] = slots(source, 1, source_ids, start, stop)
    expected[1][:, target_ids] = table.reshape(2, len(target_ids), -1)
    assert num_bytes == 2 * (stop - start) * SLOT_BYTES
    np.testing.assert_array_equal(target, expected)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_copies_over_copies_leave_the_last_ones(data: st.DataObject):
    """Blocks are written to in one way the first time, and in another later."""
    source = make_source(12)
    memory = SharedKVMemory.create(NUM_LAYERS * 2 * 10 * BLOCK_SIZE * SLOT_BYTES)
    connector = SharedMemoryConnector(source, SharedKVMemory.attach(memory.fd, memory.num_bytes), block_size=BLOCK_SIZE)
    expected = target_view(memory).copy()
    for _ in range(data.draw(st.integers(2, 6))):
        num_blocks = data.draw(st.integers(1, 5))
        first, step = data.draw(st.tuples(st.integers(0, 7), st.sampled_from([1, -1])))
        source_ids = list(range(first, first + num_blocks))[::step]
        target_ids = list(range(first := data.draw(st.integers(0, 5)), first + num_blocks))[
            :: data.draw(st.sampled_from([1, -1]))
        ]
        start = data.draw(st.integers(0, num_blocks * BLOCK_SIZE - 1))
        stop = data.draw(st.integers(start + 1, num_blocks * BLOCK_SIZE))
        connector.save_kv_layer(0, source_ids, target_ids, start, stop)
        table = expected[0][:, target_ids].reshape(2, -1, SLOT_BYTES)
        table[:, start:stop] = slots(source, 0, source_ids, start, stop)
        expected[0][:, target_ids] = table.reshape(2, len(target_ids), -1)

    np.testing.assert_array_equal(target_view(memory), expected)
    connector.close()
    memory.close()


def test_memory_that_cannot_be_written_to_is_an_error():
    memory = SharedKVMemory.create(NUM_LAYERS * 2 * 10 * BLOCK_SIZE * SLOT_BYTES)
    attached = SharedKVMemory.attach(memory.fd, memory.num_bytes)
    connector = SharedMemoryConnector(make_source(12), attached, block_size=BLOCK_SIZE)
    os.close(attached.fd)

    with pytest.raises(OSError, match="Bad file descriptor"):
        connector.save_kv_layer(0, [0, 1], [0, 1], 0, 8)
    attached.fd = -1
    connector.close()
    memory.close()


def test_blocks_at_even_steps_move_in_one_run():
    assert list(runs([5, 6, 7, 1], [9, 7, 5, 3], 2, 14, 4)) == [
        Run(5, 9, 1, 1, 1, 2, 4),
        Run(6, 7, 2, 1, -2, 0, 4),
        Run(1, 3, 1, 1, 1, 0, 2),
    ]


def test_both_sides_see_the_same_memory():
    made = SharedKVMemory.create(4096)
    attached = SharedKVMemory.attach(made.fd, 4096)

    attached.buffer[10:13] = b"abc"

    assert made.buffer[10:13] == b"abc"
    attached.close()
    made.close()


def test_memory_leaves_no_descriptor_and_no_map():
    before = num_open_descriptors(), num_kv_maps()

    made = SharedKVMemory.create(1 << 20)
    connector = SharedMemoryConnector(
        np.zeros((1, 2, 4, 16), dtype=np.uint8), SharedKVMemory.attach(made.fd, 1 << 20), block_size=4
    )
    assert num_kv_maps() > before[1]
    connector.close()
    made.close()
    made.close()  # once more does nothing

    assert (num_open_descriptors(), num_kv_maps()) == before


def test_memory_shorter_than_announced_is_refused():
    made = SharedKVMemory.create(4096)
    before = num_open_descriptors()

    with pytest.raises(ValueError, match=r"has 4096 bytes; 8192 were announced"):
        SharedKVMemory.attach(made.fd, 8192)

    assert num_open_descriptors() == before
    made.close()


def test_memory_works_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create")
    before = num_open_descriptors()

    memory = SharedKVMemory.create(4096)
    memory.buffer[:3] = b"abc"

    assert os.fstat(memory.fd).st_nlink == 0
    memory.close()
    assert num_open_descriptors() == before


def test_overlapping_intervals_count_once():
    intervals = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]

    assert covered_seconds(intervals) == 4.0
    assert overlapped_seconds(intervals, (2.5, 5.5)) == 1.0
    assert overlapped_seconds(intervals, (7.0, 9.0)) == 0.0
