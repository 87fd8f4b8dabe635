"""The compiled row operations say what torch says in fp32, up to one rounding to bf16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.models.row_ops import CompiledRowOps, TorchRowOps, row_ops
from backends.native import library

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")
EPS = 1e-5
PRECISE = TorchRowOps(torch.float32, EPS)
COMPILED = CompiledRowOps(EPS)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), width=st.integers(1, 100))
def test_norm_and_gate(rows: int, width: int):
    torch.manual_seed(rows * 100 + width)
    x, weight = (torch.randn(rows, width) * 3).bfloat16(), torch.randn(width).bfloat16()
    close(COMPILED.norm(x, weight), PRECISE.norm(x.float(), weight.float()))
    gate_up = (torch.randn(rows, 2 * width) * 20).bfloat16()
    close(COMPILED.silu_mul(gate_up), PRECISE.silu_mul(gate_up.float()))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 12),
    rotated=st.integers(1, 5),
    others=st.integers(0, 2),
    half=st.integers(1, 64),
    normed=st.booleans(),
)
def test_rotation_in_place(rows: int, rotated: int, others: int, half: int, normed: bool):
    torch.manual_seed(rows + rotated * 10 + half)
    heads = torch.randn(rows, rotated + others, 2 * half).bfloat16()
    norm = torch.randn(rotated, 2 * half).bfloat16() if normed else None
    angles = torch.randn(rows, half) * 100
    expected = PRECISE.rotate(
        heads.float(), rotated, PRECISE.rotation(angles.cos(), angles.sin()), None if norm is None else norm.float()
    )
    before = heads.clone()

    got = COMPILED.rotate(heads, rotated, COMPILED.rotation(angles.cos(), angles.sin()), norm)

    torch.testing.assert_close(
        got.float(), expected, rtol=2**-8, atol=1e-2 * 2**-8 * float(expected.abs().max()) + 1e-5
    )
    assert torch.equal(heads[:, rotated:], before[:, rotated:])


def test_only_bf16_on_a_cpu_is_compiled():
    assert isinstance(row_ops(torch.zeros(1).bfloat16(), head_dim=64, eps=EPS), CompiledRowOps)
    assert isinstance(row_ops(torch.zeros(1), head_dim=64, eps=EPS), TorchRowOps)
    assert isinstance(row_ops(torch.zeros(1).bfloat16(), head_dim=512, eps=EPS), TorchRowOps)
