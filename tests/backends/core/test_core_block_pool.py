from __future__ import annotations

import pytest

from backends.core.block_pool import BlockPool, KVCacheBlock
from backends.core.prefix_hash import PrefixKey, extend


def take(pool: BlockPool, num_blocks: int) -> list[KVCacheBlock]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def chain(*contents: tuple[int, ...]) -> list[PrefixKey]:
    keys: list[PrefixKey] = []
    for content in contents:
        keys.append(extend(keys[-1] if keys else None, content))
    return keys


def test_an_allocation_that_does_not_fit_changes_nothing():
    pool = BlockPool(3)
    take(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    assert pool.num_blocks_in_use == 2


def test_free_blocks_are_reused_least_recently_freed_first_and_the_tail_of_a_request_first():
    pool = BlockPool(4)
    first, second = take(pool, 2), take(pool, 2)
    pool.free(second)
    pool.free(first)
    assert ids(take(pool, 4)) == [3, 2, 1, 0]


def test_a_freed_block_is_found_until_its_space_is_needed():
    pool = BlockPool(2)
    keys = chain((1, 2), (3, 4))
    blocks = take(pool, 2)
    for block, key in zip(blocks, keys, strict=True):
        pool.mark_full(block, key)
    pool.free(blocks)
    assert pool.find_prefix(keys) == blocks
    assert pool.num_blocks_in_use == 0
    assert pool.num_cached_blocks == 2

    take(pool, 1)
    assert ids(pool.find_prefix(keys)) == [0], "the tail was reused first"


def test_a_touched_block_is_not_given_to_someone_else():
    pool = BlockPool(2)
    (block,) = take(pool, 1)
    pool.mark_full(block, chain((1,))[0])
    pool.free([block])
    pool.touch([block])
    pool.check_integrity([[block]])
    (other,) = take(pool, 1)
    assert other is not block
    assert pool.allocate(1) is None


def test_a_shared_block_stays_in_use_until_its_last_holder_frees_it():
    pool = BlockPool(1)
    (block,) = take(pool, 1)
    pool.mark_full(block, chain((1,))[0])
    pool.touch([block])
    pool.free([block])
    assert pool.num_blocks_in_use == 1
    pool.free([block])
    assert pool.num_blocks_in_use == 0


def test_freeing_twice_is_caught():
    pool = BlockPool(1)
    blocks = take(pool, 1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_of_two_equal_blocks_the_first_is_found_and_forgetting_the_second_leaves_it():
    pool = BlockPool(2)
    (key,) = chain((1, 2))
    (same,) = chain((1, 2))
    first, second = take(pool, 2)
    pool.mark_full(first, key)
    pool.mark_full(second, same)
    assert second.key is key, "equal keys are one object, so that descendants compare fast"
    pool.free([second])
    take(pool, 1)
    assert pool.find(key) is first


def test_a_cleared_cache_forgets_free_blocks_and_keeps_those_in_use():
    pool = BlockPool(2)
    held_key, free_key = chain((1,))[0], chain((2,))[0]
    held, free = take(pool, 2)
    pool.mark_full(held, held_key)
    pool.mark_full(free, free_key)
    pool.free([free])
    pool.clear_cache()
    assert pool.find(free_key) is None
    assert pool.find(held_key) is held
    assert pool.num_cached_blocks == 1


def test_the_peak_counts_held_blocks_and_starts_anew_from_those_held_at_its_reset():
    pool = BlockPool(10)
    blocks = take(pool, 6)
    pool.free(blocks[2:])
    assert pool.peak_blocks_in_use == 6
    pool.reset_peak()
    assert pool.peak_blocks_in_use == 2
    take(pool, 1)
    assert pool.peak_blocks_in_use == 3


@pytest.mark.parametrize("held", [0, 2], ids=["lost", "owned twice"])
def test_the_integrity_check_sees_a_block_that_is(held):
    pool = BlockPool(2)
    blocks = take(pool, 1)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError):
        pool.check_integrity([blocks] * held)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
