from __future__ import annotations

import pytest
from core_helpers import make_manager, make_request

from backends.core.kv_cache_manager import KVCacheManager, token_ids_between
from backends.core.request import Request
from backends.protocol.messages import CacheParams


def compute(manager: KVCacheManager, request: Request) -> None:
    """Admit a request and compute all its tokens."""
    assert manager.admit(request)
    since = request.num_computed_tokens
    request.num_computed_tokens = request.num_tokens
    manager.cache_full_blocks(request, since=since)


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_only_full_blocks_hit_and_the_last_prompt_token_is_always_recomputed(num_tokens, hit):
    manager = make_manager(block_size=4)
    compute(manager, make_request("first", tokens=range(num_tokens)))
    again = make_request("again", tokens=range(num_tokens))
    assert manager.admit(again)
    assert again.num_computed_tokens == hit
    assert again.num_cached_tokens == hit
    assert hit <= num_tokens - 1


def test_blocks_of_generated_tokens_hit_in_the_next_turn():
    manager = make_manager(block_size=4)
    first = make_request("first", tokens=range(6))
    compute(manager, first)
    first.output_token_ids = [100, 101, 102]
    first.num_computed_tokens = 8  # the newest token's KV is not computed
    manager.allocate_slots(first, 0)
    manager.cache_full_blocks(first, since=6)
    manager.free(first)
    second = make_request("second", tokens=[*range(6), 100, 101, 102, 50, 51])
    assert manager.admit(second)
    assert second.num_cached_tokens == 8


def test_different_salts_share_nothing_and_the_same_salt_shares():
    manager = make_manager()
    salted = CacheParams(cache_salt="a")
    compute(manager, make_request("first", num_tokens=8, tokens=range(9), cache=salted))
    for cache, hit in [(CacheParams(cache_salt="b"), 0), (CacheParams(), 0), (salted, 8)]:
        other = make_request("other", tokens=range(9), cache=cache)
        assert manager.admit(other)
        assert other.num_cached_tokens == hit
        manager.free(other)


def test_a_request_without_prefix_cache_neither_writes_nor_reads():
    manager = make_manager()
    off = CacheParams(enable_prefix_cache=False)
    compute(manager, make_request("writes not", tokens=range(9), cache=off))
    assert manager.pool.num_cached_blocks == 0
    compute(manager, make_request("writes", tokens=range(9)))
    reads_not = make_request("reads not", tokens=range(9), cache=off)
    assert manager.admit(reads_not)
    assert reads_not.num_cached_tokens == 0
    assert manager.prefix_query_tokens == 9, "only the request that asked is counted"


def test_an_engine_without_prefix_cache_keeps_nothing():
    manager = make_manager(enable_prefix_cache=False)
    compute(manager, make_request("first", tokens=range(9)))
    assert manager.pool.num_cached_blocks == 0


def test_hits_are_counted_at_first_admission_only():
    manager = make_manager()
    request = make_request(tokens=range(9))
    compute(manager, request)
    manager.free(request)
    assert manager.admit(request)
    assert request.num_computed_tokens == 8, "its own blocks are found again after a preemption"
    assert request.num_cached_tokens == 0
    assert (manager.prefix_query_tokens, manager.prefix_hit_tokens) == (9, 0)


def test_admission_counts_free_blocks_that_are_hit_as_taken():
    manager = make_manager(num_blocks=3, block_size=4)
    first = make_request("first", tokens=range(8))
    compute(manager, first)
    manager.free(first)
    taken = manager.pool.allocate(1)
    assert taken is not None
    longer = make_request("longer", tokens=range(12))
    assert not manager.admit(longer), "2 free blocks, 1 of them a hit, and 3 needed"
    assert longer.blocks == []
    assert longer.num_cached_tokens is None
    manager.pool.check_integrity([taken])


def test_admission_leaves_the_spare_blocks():
    manager = make_manager(num_blocks=4, block_size=4)
    assert not manager.admit(make_request(num_tokens=12), num_spare_blocks=2)
    assert manager.admit(make_request(num_tokens=12), num_spare_blocks=1)


def test_slots_are_allocated_only_when_a_block_is_full():
    manager = make_manager(num_blocks=2, block_size=4)
    request = make_request(num_tokens=4)
    compute(manager, request)
    assert manager.allocate_slots(request, 1)
    assert len(request.blocks) == 2
    request.num_computed_tokens = 8
    assert not manager.allocate_slots(request, 1)
    assert len(request.blocks) == 2


def test_a_digest_that_collides_never_serves_blocks_of_another_text():
    manager = make_manager(block_size=2, digest=lambda data: bytes([data[-8] % 2]))
    texts = [[1, 2, 3, 4, 9], [5, 6, 7, 8, 9], [1, 2, 7, 8, 9], [5, 6, 3, 4, 9]]
    for number, text in enumerate(texts):
        compute(manager, make_request(str(number), tokens=text))
    for text in texts:
        request = make_request("again", tokens=text)
        for index, block in enumerate(manager.find_computed(request)):
            assert block.key is not None
            assert list(block.key.token_ids) == text[2 * index : 2 * index + 2]
            if index:
                assert block.key.parent is not None
                assert list(block.key.parent.token_ids) == text[:2]


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 3), (2, 5), (3, 5), (4, 6), (0, 6)])
def test_tokens_are_cut_across_prompt_and_output(start, stop):
    request = make_request(tokens=[0, 1, 2])
    request.output_token_ids = [3, 4, 5]
    assert token_ids_between(request, start, stop) == list(range(start, stop))
