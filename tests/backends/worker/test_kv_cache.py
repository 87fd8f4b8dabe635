"""Size, layout and owner of the KV cache's memory."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from backends.config import EngineConfig
from backends.models.spec import ModelSpec
from backends.worker.kv_cache import PagedKVCache, choose_kv_dtype, kv_bytes_per_token, num_blocks_for

SPEC = ModelSpec(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=10,
    max_model_len=64,
    dtype="bf16",
    weight_dtype="bf16",
    fingerprint="f",
)
BYTES_PER_BLOCK = 3 * 2 * 2 * 8 * 2 * 16


def make_config(**values: Any) -> EngineConfig:
    return EngineConfig(role="merged", model="m", **values)


def test_sizes_follow_from_the_model() -> None:
    cache = PagedKVCache.allocate(SPEC, 5, 16)
    assert cache.tensor.shape == (3, 2, 5, 16, 2, 8)
    assert cache.tensor.dtype == torch.bfloat16
    assert (cache.num_blocks, cache.block_size) == (5, 16)
    assert cache.bytes_per_block == BYTES_PER_BLOCK == kv_bytes_per_token(SPEC) * 16
    assert cache.num_bytes == 5 * BYTES_PER_BLOCK
    assert PagedKVCache.allocate(SPEC, 5, 16, "fp32").num_bytes == 10 * BYTES_PER_BLOCK


def test_an_int8_slot_holds_a_scale_for_each_kv_head() -> None:
    cache = PagedKVCache.allocate(SPEC, 5, 16, "int8")
    assert cache.tensor.shape == (3, 2, 5, 16, 2, 8 + 4)
    assert cache.tensor.dtype == torch.int8
    assert cache.bytes_per_block == 16 * kv_bytes_per_token(SPEC, "int8") == 16 * 3 * 2 * 2 * (8 + 4)
    memory = torch.zeros(cache.num_bytes, dtype=torch.uint8)
    assert PagedKVCache.from_bytes(memory, SPEC, 5, 16, "int8").tensor.shape == cache.tensor.shape


def tokens_gib(num_tokens: float, dtype: str = "bf16") -> float:
    return num_tokens * kv_bytes_per_token(SPEC, dtype) / 2**30


def test_auto_is_the_activations_type_where_a_whole_context_fits() -> None:
    assert choose_kv_dtype(make_config(), SPEC) == ("bf16", ())
    assert choose_kv_dtype(make_config(kv_cache_gib=tokens_gib(64)), SPEC) == ("bf16", ())


def test_auto_is_int8_where_a_whole_context_does_not_fit_and_says_so() -> None:
    dtype, notices = choose_kv_dtype(make_config(kv_cache_gib=tokens_gib(63)), SPEC)
    assert dtype == "int8"
    assert [part in notices[0] for part in ("63 tokens", "context of 64", "bf16", "kv_cache_gib")] == [True] * 4
    limited = make_config(kv_cache_gib=tokens_gib(640), auto_kv_dtype_gib=tokens_gib(63))
    assert choose_kv_dtype(limited, SPEC)[0] == "int8"


def test_auto_keeps_the_activations_type_where_int8_would_gain_nothing_and_a_name_always_stays() -> None:
    assert choose_kv_dtype(make_config(num_kv_blocks=1), SPEC) == ("bf16", ())
    assert choose_kv_dtype(make_config(kv_cache_gib=tokens_gib(63), kv_cache_dtype="fp16"), SPEC) == ("fp16", ())


def test_shared_memory_is_used_in_place() -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 4 * BYTES_PER_BLOCK), dtype=torch.uint8)
    one, other = (PagedKVCache.from_bytes(memory, SPEC, 4, 16) for _ in range(2))
    one.tensor[2, 1, 3, 15] = 7.0
    assert (other.tensor[2, 1, 3, 15] == 7.0).all()
    assert other.tensor.count_nonzero() == 16


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        PagedKVCache.from_bytes(torch.zeros(BYTES_PER_BLOCK, dtype=torch.uint8), SPEC, 2, 16)


def test_an_exact_number_of_blocks_wins_over_a_size() -> None:
    assert num_blocks_for(make_config(num_kv_blocks=9, kv_cache_gib=1.0), SPEC) == 9
    assert num_blocks_for(make_config(kv_cache_gib=0.5), SPEC) == 2**29 // BYTES_PER_BLOCK
    assert num_blocks_for(make_config(), SPEC) == 2**30 // BYTES_PER_BLOCK
    assert num_blocks_for(make_config(kv_cache_gib=0.5, kv_cache_dtype="fp32"), SPEC) == 2**28 // BYTES_PER_BLOCK


def test_a_pool_without_room_for_one_block_names_the_settings() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_gib.*num_kv_blocks"):
        num_blocks_for(make_config(kv_cache_gib=1e-6), SPEC)
