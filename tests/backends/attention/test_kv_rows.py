"""Rows of the KV cache in int8: what is lost, and that compiled code and torch write the same bytes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.attention.kv_rows import decode_rows, encode_int8, row_width, write_rows
from backends.native import library

torch.set_num_threads(1)


@given(
    head_dim=st.sampled_from([1, 6, 16, 64, 100]),
    size=st.sampled_from([1e-20, 1e-4, 1.0, 300.0, 1e20]),
    bias=st.sampled_from([0.0, 5.0, 200.0]),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_every_element_is_within_half_a_step_of_its_row(head_dim: int, size: float, bias: float) -> None:
    torch.manual_seed(head_dim)
    rows = (torch.randn(5, 3, head_dim) + bias * torch.randn(head_dim)) * size
    encoded = encode_int8(rows)

    assert encoded.dtype == torch.int8
    assert encoded.shape == (5, 3, row_width(head_dim, torch.int8))
    half_step = rows.abs().amax(-1, keepdim=True) / 254
    assert ((decode_rows(encoded, torch.float32) - rows).abs() <= half_step * 1.0001).all()


def test_one_large_element_costs_its_own_row_and_no_other() -> None:
    rows = torch.ones(2, 2, 4)
    rows[1, 0, 3] = 1270.0
    assert decode_rows(encode_int8(rows), torch.float32).tolist() == [
        [[1.0] * 4, [1.0] * 4],
        [[0.0, 0.0, 0.0, 1270.0], [1.0] * 4],
    ]


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    rows = torch.zeros(3, 1, 4)
    rows[1, 0, 2], rows[2, 0, 1] = math.nan, math.inf
    written = torch.empty(3, 1, row_width(4, torch.int8), dtype=torch.int8)
    write_rows(written, torch.arange(3), rows)  # compiled, where that is to be had
    for stored in (encode_int8(rows), written):
        decoded = decode_rows(stored, torch.float32)
        assert decoded[0].tolist() == [[0.0] * 4]
        assert decoded[1:].isnan().all()


@pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")
@given(
    num_rows=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 6, 16, 64, 100]),
    size=st.sampled_from([0.0, 1e-35, 1e-4, 1.0, 1e20, math.inf]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strided=st.booleans(),
    threads=st.integers(1, 2),
)
@settings(max_examples=80, derandomize=True, deadline=None)
def test_compiled_code_and_torch_write_the_same_bytes(
    num_rows: int, kv_heads: int, head_dim: int, size: float, dtype: torch.dtype, strided: bool, threads: int
) -> None:
    torch.manual_seed(num_rows)
    heads = (torch.randn(num_rows, kv_heads + 2, head_dim) * size).to(dtype)
    rows = heads[:, 1 : 1 + kv_heads] if strided else heads[:, 1 : 1 + kv_heads].contiguous()
    slots = torch.randperm(num_rows + 4)[:num_rows]
    expected = torch.full((num_rows + 4, kv_heads, row_width(head_dim, torch.int8)), -1, dtype=torch.int8)
    actual = expected.clone()
    expected.index_copy_(0, slots, encode_int8(rows))
    torch.set_num_threads(threads)
    try:
        write_rows(actual, slots, rows)
    finally:
        torch.set_num_threads(1)

    assert torch.equal(actual, expected)


@given(
    num_keys=st.integers(1, 90),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 32, 64, 128]),
    size=st.sampled_from([0.1, 1.0, 4.0]),
    key_bias=st.sampled_from([0.0, 0.0, 10.0]),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_attention_over_int8_is_close_to_attention_over_fp32(
    num_keys: int, kv_heads: int, group: int, head_dim: int, size: float, key_bias: float
) -> None:
    """A score is off by at most e = scale * |q|_1 * max|k| / 254, so a weight by a factor within exp(+-2e).

    A value is off by at most max|v| / 254. The output is therefore off by at most (exp(2e) - 1 + 1 / 254) * max|v|.
    """
    torch.manual_seed(num_keys)
    query = torch.randn(kv_heads * group, 1, head_dim)
    key, value = (torch.randn(kv_heads, num_keys, head_dim) * size for _ in "kv")
    key[..., ::7] += key_bias
    stored_key, stored_value = (decode_rows(encode_int8(rows), torch.float32) for rows in (key, value))

    exact = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    got = F.scaled_dot_product_attention(query, stored_key, stored_value, enable_gqa=True)

    longest = (key.abs().amax((1, 2)) / 254).repeat_interleave(group)
    score_error = head_dim**-0.5 * query.abs().sum((1, 2)) * longest
    bound = (torch.expm1(2 * score_error) + 1 / 254) * value.abs().amax((1, 2)).repeat_interleave(group)
    assert ((got - exact).abs().amax((1, 2)) <= bound + 1e-5).all()
