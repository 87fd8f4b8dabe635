"""Pages kept resident ahead: as many as said, in order, further as blocks are handed out, and none after closing."""

import mmap
import os
import sys
import threading

import pytest

from backends.kv_transfer.base import KVLayout
from backends.kv_transfer.pages import MAX_BYTES_AHEAD, Prefaulter, num_blocks_ahead, populate
from backends.kv_transfer.shared_memory import SharedKVMemory

DEADLINE = 10.0
PAGE = mmap.PAGESIZE
LAYOUT = KVLayout(num_layers=2, num_blocks=8, bytes_per_block=256 * 1024)  # a block is a piece
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are populated on Linux only")


class ScriptedPopulate:
    """Notes the blocks of each call; `wait` returns once so many regions were asked for."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.calls: list[tuple[int, int]] = []
        self.can = True
        self._first: int | None = None
        self._changed = threading.Condition()

    def __call__(self, address: int, length: int) -> bool:
        with self._changed:
            self._first = address if self._first is None else self._first
            self.calls.append(((address - self._first) // LAYOUT.bytes_per_block, length // LAYOUT.bytes_per_block))
            self._changed.notify_all()
        return self.can

    def wait(self, num_calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= num_calls, DEADLINE)


def make(num_ahead: int) -> tuple[Prefaulter, ScriptedPopulate]:
    buffer = mmap.mmap(-1, LAYOUT.num_bytes)
    populate = ScriptedPopulate(buffer)
    return Prefaulter(buffer, LAYOUT, num_blocks_ahead=num_ahead, populate=populate), populate


def regions(block: int) -> list[tuple[int, int]]:
    """K and V of a block in every layer."""
    return [(region * LAYOUT.num_blocks + block, 1) for region in range(LAYOUT.num_layers * 2)]


def test_so_many_blocks_are_resident_ahead_and_no_more():
    prefaulter, populate = make(2)

    populate.wait(8)
    prefaulter.prefault([1])  # two more than 0..1
    populate.wait(16)
    prefaulter.prefault([0])  # known to be there
    prefaulter.prefault([])
    prefaulter.close()

    assert populate.calls == [*regions(0), *regions(1), *regions(2), *regions(3)]


def test_the_pool_has_an_end():
    prefaulter, populate = make(3)
    prefaulter.prefault([LAYOUT.num_blocks - 1])

    populate.wait(4 * LAYOUT.num_blocks)
    prefaulter.close()

    assert populate.calls == [region for block in range(LAYOUT.num_blocks) for region in regions(block)]


def test_where_the_system_cannot_it_is_not_asked_again():
    prefaulter, populate = make(0)
    populate.can = False
    prefaulter.prefault([3])
    populate.wait(1)
    prefaulter._thread.join(DEADLINE)
    prefaulter.prefault([5])
    prefaulter.close()

    assert populate.calls == [(0, 1)]


def test_hints_after_closing_do_nothing():
    prefaulter, populate = make(0)
    prefaulter.close()

    prefaulter.prefault([7])
    prefaulter.close()

    assert populate.calls == []


@linux
def test_populating_makes_pages_and_mapping_does_not_lose_what_they_hold():
    memory = SharedKVMemory.create(8 * PAGE)
    other = SharedKVMemory.attach(memory.fd, 8 * PAGE)
    os.pwrite(memory.fd, b"abc", PAGE + 7)
    assert resident_bytes(memory) == PAGE

    address = address_of(other)
    assert populate(address + PAGE + 7, 3, write=False)
    assert resident_bytes(memory) == PAGE
    assert populate(address + PAGE + 7, 2 * PAGE)

    assert resident_bytes(memory) == 3 * PAGE
    assert other.buffer[PAGE + 7 : PAGE + 10] == b"abc"
    other.close()
    memory.close()


@linux
def test_a_new_pool_is_resident_ahead_of_what_is_used_and_not_beyond():
    layout = KVLayout(num_layers=2, num_blocks=16, bytes_per_block=PAGE)
    memory = SharedKVMemory.create_for(layout, num_blocks_ahead=0)
    assert resident_bytes(memory) == 0

    done = threading.Event()
    memory.close()
    memory = SharedKVMemory.create(layout.num_bytes)
    calls: list[int] = []

    def counted(address: int, length: int) -> bool:
        able = populate(address, length)
        calls.append(length)
        if len(calls) == 4:
            done.set()
        return able

    prefaulter = Prefaulter(memory.buffer, layout, num_blocks_ahead=3, populate=counted)
    assert done.wait(DEADLINE)
    prefaulter.close()

    assert resident_bytes(memory) == 4 * 3 * PAGE
    memory.close()


def test_what_is_kept_ahead_is_bounded():
    small = KVLayout(num_layers=30, num_blocks=4000, bytes_per_block=6144)

    assert num_blocks_ahead(small, 128) == 128
    bytes_of_all = num_blocks_ahead(small, 100_000) * 30 * 2 * 6144
    assert MAX_BYTES_AHEAD - 30 * 2 * 6144 < bytes_of_all <= MAX_BYTES_AHEAD


def resident_bytes(memory: SharedKVMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def address_of(memory: SharedKVMemory) -> int:
    import numpy as np

    return int(np.frombuffer(memory.buffer, dtype=np.uint8).ctypes.data)
