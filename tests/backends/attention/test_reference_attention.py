"""Paged attention against attention written out, for any mix of chunks and single tokens."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.attention import reference
from backends.attention.base import AttentionBackend, AttentionParams, PagedStep, QuerySpan
from backends.attention.compiled import CompiledAttention
from backends.attention.kv_rows import decode_rows, encode_int8, row_width, write_rows
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.native import library

torch.set_num_threads(1)
BLOCK, NUM_BLOCKS, KV_HEADS, HEADS, DIM = 4, 96, 2, 6, 8
BACKENDS = [ReferenceAttention(), *([CompiledAttention()] if library.available() else [])]
Lengths = list[tuple[int, int]]  # (tokens already in the cache, new tokens) of each request


def written_out(query: Tensor, key: Tensor, value: Tensor, start: int, params: AttentionParams) -> Tensor:
    """One request: query [rows, HEADS, DIM] at positions from `start`, key and value of all positions."""
    key = key.repeat_interleave(HEADS // KV_HEADS, dim=1)
    value = value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    rows = torch.arange(start, start + query.shape[0])[:, None]
    keys = torch.arange(key.shape[0])[None]
    hidden = keys > rows
    if params.sliding_window is not None:
        hidden |= keys <= rows - params.sliding_window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


def in_cache(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache of this type holds of them."""
    return decode_rows(encode_int8(rows), torch.float32) if dtype == torch.int8 else rows.to(dtype).float()


def check(lengths: Lengths, params: AttentionParams, *, in_order: bool, dtype: torch.dtype = torch.float32) -> None:
    for backend in BACKENDS:
        check_backend(backend, lengths, params, in_order=in_order, dtype=dtype)


def check_backend(
    backend: AttentionBackend, lengths: Lengths, params: AttentionParams, *, in_order: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    cache = torch.empty(2, 2, NUM_BLOCKS, BLOCK, KV_HEADS, row_width(DIM, dtype), dtype=dtype)
    poison = cache.view(torch.uint8).fill_(255)  # NaN, also as the scale of an int8 row
    ids = list(range(NUM_BLOCKS))
    if not in_order:
        random.Random(2).shuffle(ids)
    spans, slots, keys, values, row = [], [], [], [], 0
    for start, num_tokens in lengths:
        stop = start + num_tokens
        blocks = [ids.pop(0) for _ in range(-(-stop // BLOCK))]
        keys.append(torch.randn(stop, KV_HEADS, DIM))
        values.append(torch.randn(stop, KV_HEADS, DIM))
        places = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(stop)]
        flat = cache[1].flatten(1, 2)
        write_rows(flat[0], torch.tensor(places[:start], dtype=torch.int64), keys[-1][:start])
        write_rows(flat[1], torch.tensor(places[:start], dtype=torch.int64), values[-1][:start])
        spans.append(QuerySpan(row, num_tokens, start, blocks))
        slots += places[start:]
        row += num_tokens
    query = torch.randn(row, HEADS, DIM)
    attention = PagedAttention(cache, PagedStep(tuple(spans), torch.tensor(slots)), backend)
    new_keys = torch.cat([key[start:] for key, (start, _) in zip(keys, lengths, strict=True)])
    new_values = torch.cat([value[start:] for value, (start, _) in zip(values, lengths, strict=True)])
    actual = attention(1, query, new_keys, new_values, params)
    assert (poison[0] == 255).all(), "another layer's cache was written"
    for span, key, value in zip(spans, keys, values, strict=True):
        rows = slice(span.row, span.row + span.num_tokens)
        expected = written_out(query[rows], in_cache(key, dtype), in_cache(value, dtype), span.start, params)
        torch.testing.assert_close(actual[rows], expected, rtol=1e-4, atol=1e-5)


lengths_of_requests = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([1, 1, 2, 5, 9, 20])), min_size=1, max_size=6
)


@given(
    lengths_of_requests,
    st.sampled_from([None, 1, 3, 4, 7, 100]),
    st.sampled_from([None, 0.7]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.int8]),
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_any_mix_is_each_requests_own_attention(
    lengths: Lengths, window: int | None, softcap: float | None, in_order: bool, dtype: torch.dtype
) -> None:
    check(lengths, AttentionParams(0.3, window, softcap), in_order=in_order, dtype=dtype)


@pytest.mark.parametrize("window", [None, 5])
def test_a_chunk_of_several_tiles_is_masked_in_each(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ROWS", 4)
    check([(6, 19), (0, 8), (3, 1)], AttentionParams(0.3, window), in_order=False)


def test_a_tile_shrinks_where_scores_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_TILE_SCORES", HEADS * 20 * 3)
    check([(1, 19)], AttentionParams(0.3), in_order=False)


def test_requests_of_very_different_length_are_not_padded_to_one_another() -> None:
    check([(300, 1), (2, 1), (0, 1), (40, 1)], AttentionParams(0.3), in_order=False)
    spans = [QuerySpan(i, 1, start, []) for i, start in enumerate([5000, 2, 7, 4900])]
    assert [[span.row for span in group] for group in reference._group_by_length(spans, None)] == [[1, 2], [3, 0]]


def test_a_cache_of_another_data_type_is_converted_both_ways() -> None:
    check([(5, 6), (9, 1)], AttentionParams(0.3), in_order=True, dtype=torch.bfloat16)


def test_whoever_moves_kv_hears_of_a_layer_once_its_kv_is_written() -> None:
    cache = torch.full((3, 2, 4, BLOCK, KV_HEADS, DIM), float("nan"))
    seen: list[tuple[int, float]] = []
    step = PagedStep((QuerySpan(0, 2, 0, [3]),), torch.tensor([12, 13]))
    attention = PagedAttention(
        cache, step, ReferenceAttention(), lambda layer: seen.append((layer, float(cache[layer, 1, 3, 1, 0, 0])))
    )
    for layer in range(3):
        new = torch.full((2, KV_HEADS, DIM), float(layer))
        attention(layer, torch.randn(2, HEADS, DIM), new, new, AttentionParams(1.0))
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
