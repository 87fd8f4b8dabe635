"""The compiled kernels against plain torch over random shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from backends.attention.kv_rows import decode_rows, row_width, write_rows
from backends.native import library
from backends.native.library import PackedMatrix, WeightKind

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")


def reference_weights(kind: WeightKind, values: torch.Tensor, d: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    if kind is WeightKind.Q4:
        return values.float() * d.float().repeat_interleave(32, 1) + m.float().repeat_interleave(32, 1)
    if kind is WeightKind.Q8:
        return values.float() * d.float().repeat_interleave(32, 1)
    return values.float()


def random_values(kind: WeightKind, shape: tuple[int, int]) -> torch.Tensor:
    if kind is WeightKind.Q4:
        return torch.randint(0, 16, shape, dtype=torch.uint8)
    if kind is WeightKind.Q8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(torch.bfloat16 if kind is WeightKind.BF16 else torch.float32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(list(WeightKind)),
    tiles=st.integers(1, 5),
    groups=st.integers(1, 6),
    rows=st.integers(1, library.MAX_ROWS),
    biased=st.booleans(),
    threads=st.integers(1, 2),
)
def test_a_product_equals_the_dequantized_matrix(
    kind: WeightKind, tiles: int, groups: int, rows: int, biased: bool, threads: int
):
    torch.manual_seed(tiles * 100 + groups * 10 + rows)
    shape = (tiles * 16, groups * 32)
    values = random_values(kind, shape)
    d, m = (torch.randn(shape[0], groups).to(torch.float16) / 16 for _ in range(2))
    bias = torch.randn(shape[0]) if biased else None
    x = torch.randn(rows, shape[1])

    got = PackedMatrix.pack(kind, values, d=d, m=m, bias=bias).product(x, num_threads=threads)

    entering = x if kind is WeightKind.FP32 else x.to(torch.bfloat16).float()
    expected = entering @ reference_weights(kind, values, d, m).T + (0 if bias is None else bias)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="16 x 32"):
        PackedMatrix.pack(WeightKind.FP32, torch.zeros(8, 32))


def poisoned_cache(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN in every float type, and as the scale of every int8 row."""
    cache = torch.empty(num_blocks, block_size, kv_heads, row_width(head_dim, dtype), dtype=dtype)
    cache.view(torch.uint8).fill_(255)
    return cache


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return decode_rows(cache.flatten(0, 1)[slots], torch.float32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64, 128]),
    block_size=st.sampled_from([1, 8, 16]),
    window=st.sampled_from([0, 5, 64]),
    threads=st.integers(1, 2),
)
def test_attention_equals_sdpa_over_gathered_blocks(
    dtype: torch.dtype,
    lengths: list[int],
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    threads: int,
):
    torch.manual_seed(len(lengths) + lengths[0])
    width = -(-max(lengths) // block_size)
    num_blocks = width * len(lengths) + 2
    keys, values = (poisoned_cache(num_blocks, block_size, kv_heads, head_dim, dtype) for _ in "kv")
    tables = torch.randperm(num_blocks)[: width * len(lengths)].view(len(lengths), width).to(torch.int32)
    query = torch.randn(len(lengths), kv_heads * group, head_dim)
    expected = []
    for row, length in enumerate(lengths):
        slots = (tables[row].long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        for cache in (keys, values):
            write_rows(cache.flatten(0, 1), slots, torch.randn(length, kv_heads, head_dim))
        first = max(0, length - window) if window else 0
        k, v = (read(c, slots[first:]).transpose(0, 1) for c in (keys, values))
        expected.append(scaled_dot_product_attention(query[row][:, None], k, v, enable_gqa=True)[:, 0])
    last = torch.tensor(lengths, dtype=torch.int32)
    first_keys = (last - window).clamp(min=0) if window else torch.zeros_like(last)

    got = library.paged_attention(
        query, (keys, values), tables, (first_keys, last), scale=head_dim**-0.5, num_threads=threads
    )

    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    start=st.integers(0, 200),
    num_tokens=st.integers(1, 150),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([1, 8, 16]),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    dtype=st.sampled_from([torch.bfloat16, torch.int8]),
    threads=st.integers(1, 2),
)
def test_a_chunk_in_bf16_is_as_close_to_fp32_attention_as_bf16_allows(
    start: int,
    num_tokens: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
):
    torch.manual_seed(start * 200 + num_tokens)
    stop = start + num_tokens
    width = -(-stop // block_size)
    keys, values = (poisoned_cache(width + 2, block_size, kv_heads, head_dim, dtype) for _ in "kv")
    table = torch.randperm(width + 2)[:width].to(torch.int32)
    slots = (table.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:stop]
    for cache in (keys, values):
        write_rows(cache.flatten(0, 1), slots, torch.randn(stop, kv_heads, head_dim))
    query = torch.randn(num_tokens, kv_heads * group, head_dim).bfloat16()
    if not library.can_prefill(query, keys):
        pytest.skip("this processor has no bf16 instructions")

    got = library.paged_prefill(
        query, (keys, values), table, start=start, scale=head_dim**-0.5, window=window, num_threads=threads
    )

    k, v = (read(cache, slots).transpose(0, 1) for cache in (keys, values))
    rows, columns = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
    visible = (columns <= rows) & ((columns > rows - window) if window else torch.ones(1, dtype=torch.bool))
    expected = scaled_dot_product_attention(query.float().transpose(0, 1), k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(got.float(), expected.transpose(0, 1), rtol=0.02, atol=0.02)
