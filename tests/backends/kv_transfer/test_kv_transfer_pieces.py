"""The compiled copy moves exactly the slots that it is told to, as the plain one does."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from backends.kv_transfer.part_cache import upwards
from backends.kv_transfer.pieces import PieceCopier, pieces_of
from backends.kv_transfer.runs import runs
from backends.kv_transfer.shared_memory import SharedKVMemory, SharedMemoryConnector

LAYERS, BLOCKS, BLOCK_SIZE, BYTES_PER_SLOT = 5, 12, 4, 6
BYTES_PER_BLOCK = BLOCK_SIZE * BYTES_PER_SLOT
SHAPE = (LAYERS, 2, BLOCKS, BYTES_PER_BLOCK)


@pytest.fixture
def memory() -> Iterator[SharedKVMemory]:
    made = SharedKVMemory.create(int(np.prod(SHAPE)))
    yield made
    made.close()


def expected(source, target, source_ids, target_ids, start, stop, layers):
    wanted = target.copy()
    for token in range(start, stop):
        index, slot = divmod(token, BLOCK_SIZE)
        part = slice(slot * BYTES_PER_SLOT, (slot + 1) * BYTES_PER_SLOT)
        for layer in layers:
            wanted[layer, :, target_ids[index], part] = source[layer, :, source_ids[index], part]
    return wanted


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_the_tokens_of_a_part_and_nothing_else(seed: int):
    rng, bytes_of = random.Random(seed), np.random.default_rng(seed)
    source, target = (bytes_of.integers(0, 255, SHAPE, dtype=np.uint8) for _ in range(2))
    source_ids, target_ids = (block_ids(rng) for _ in range(2))
    start, stop = sorted(rng.sample(range(len(source_ids) * BLOCK_SIZE + 1), 2))
    layers = rng.sample(range(LAYERS), 3)
    wanted = expected(source, target, source_ids, target_ids, start, stop, layers)

    copier = PieceCopier.make(source, target)
    assert copier is not None
    plan = [upwards(run) for run in runs(source_ids, target_ids, start, stop, BLOCK_SIZE)]
    copier.copy(layers, pieces_of(plan, bytes_per_block=BYTES_PER_BLOCK, bytes_per_slot=BYTES_PER_SLOT))

    assert (target == wanted).all()


def block_ids(rng: random.Random) -> list[int]:
    """Upwards, downwards or in any order, as a free list gives them."""
    ids = rng.sample(range(BLOCKS), 6)
    return rng.choice([ids, sorted(ids), list(range(6)), list(range(9, 3, -1))])


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2, 3), (4,)])
def test_a_block_holds_the_newest_copy_however_often_it_was_written(layers, memory: SharedKVMemory):
    bytes_of = np.random.default_rng(1)
    source = np.zeros(SHAPE, dtype=np.uint8)
    connector = SharedMemoryConnector(source, SharedKVMemory.attach(memory.fd, memory.num_bytes), block_size=BLOCK_SIZE)
    target = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(SHAPE)
    for _ in range(4):  # through the descriptor, by mapping, then by the compiled copy
        source[:] = bytes_of.integers(0, 255, SHAPE, dtype=np.uint8)
        wanted = expected(source, target, [3, 4, 5], [0, 1, 2], 2, 11, layers)
        moved = connector.save_kv_layers(layers, [3, 4, 5], [0, 1, 2], 2, 11)
        assert moved == 2 * 9 * BYTES_PER_SLOT * len(layers)
        assert (target == wanted).all()
    connector.close()
    del target


def test_a_cache_with_gaps_is_left_to_the_plain_copy():
    whole = np.zeros((LAYERS, 2, 2 * BLOCKS, BYTES_PER_BLOCK), dtype=np.uint8)

    assert PieceCopier.make(whole[:, :, ::2], np.zeros(SHAPE, dtype=np.uint8)) is None
