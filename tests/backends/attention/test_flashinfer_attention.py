"""FlashInfer's way of a step, with a strict double of the package: what it is asked gives each request's attention."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep, QuerySpan
from backends.attention.flashinfer import FlashInferAttention, FlashInferUnavailable, load_flashinfer, unsuited
from backends.attention.kv_rows import row_width
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from support.flashinfer_double import FlashInferDouble

torch.set_num_threads(1)
BLOCK, NUM_BLOCKS = 4, 64
Lengths = list[tuple[int, int]]  # (tokens already in the cache, new tokens) of each request
MIX: Lengths = [(5, 1), (0, 7), (30, 3), (0, 1), (8, 4)]
SINGLE: Lengths = [(5, 1), (0, 1), (31, 1), (3, 1)]


def flashinfer() -> tuple[FlashInferAttention, FlashInferDouble]:
    package = FlashInferDouble()
    return FlashInferAttention(package, torch.zeros(64, dtype=torch.uint8)), package


def make_step(lengths: Lengths) -> PagedStep:
    ids = list(range(NUM_BLOCKS))
    random.Random(2).shuffle(ids)
    spans, slots, row = [], [], 0
    for start, num_tokens in lengths:
        blocks = [ids.pop() for _ in range(-(-(start + num_tokens) // BLOCK))]
        spans.append(QuerySpan(row, num_tokens, start, [*blocks, ids[0]]))  # may have a block more than it needs
        slots += [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, start + num_tokens)]
        row += num_tokens
    return PagedStep(tuple(spans), torch.tensor(slots))


def attend(
    backend: AttentionBackend,
    lengths: Lengths,
    layers: list[AttentionParams],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    kv_dtype: torch.dtype = torch.float16,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """The layers' outputs, of the same inputs for every backend."""
    torch.manual_seed(1)
    shape = (len(layers), 2, NUM_BLOCKS, BLOCK, kv_heads)
    cache = torch.randn(*shape, row_width(dim, kv_dtype)).to(kv_dtype)
    if kv_dtype == torch.int8:
        cache[..., -4:] = torch.full((*shape, 1), 0.02).view(torch.int8)
    step = make_step(lengths)
    rows = len(step.slot_mapping)
    attention = PagedAttention(cache, step, backend)
    outputs = []
    for layer, params in enumerate(layers):
        query, key, value = (torch.randn(rows, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
        outputs.append(attention(layer, query, key, value, params))
    return torch.stack(outputs)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 2, 5, 9])), min_size=1, max_size=5),
    st.sampled_from([None, 1, 3, 4, 100]),
    st.sampled_from([None, 0.7]),
    st.sampled_from([(6, 2), (2, 2), (10, 2)]),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_mix_gives_what_torch_gives(
    lengths: Lengths, window: int | None, softcap: float | None, heads: tuple[int, int]
) -> None:
    backend, package = flashinfer()
    layers = [AttentionParams(0.2, window, softcap)]
    actual = attend(backend, lengths, layers, heads=heads[0], kv_heads=heads[1])
    expected = attend(ReferenceAttention(), lengths, layers, heads=heads[0], kv_heads=heads[1])
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    assert package.runs == ["decode" if all(new == 1 for _, new in lengths) else "prefill"]


@pytest.mark.parametrize(("lengths", "kind"), [(MIX, "prefill"), (SINGLE, "decode")])
def test_a_step_is_planned_once_for_each_kind_of_layer(lengths: Lengths, kind: str) -> None:
    backend, package = flashinfer()
    layers = [AttentionParams(0.2), AttentionParams(0.2, 3), AttentionParams(0.2), AttentionParams(0.2, 3, 0.5)] * 2
    actual = attend(backend, lengths, layers)
    torch.testing.assert_close(actual, attend(ReferenceAttention(), lengths, layers), rtol=1e-2, atol=1e-2)
    assert (package.plans, package.runs) == ([kind] * 3, [kind] * 8)


def test_the_next_step_is_planned_anew_with_the_same_wrappers() -> None:
    backend, package = flashinfer()
    layers = [AttentionParams(0.2)]
    for lengths in (MIX, SINGLE, [(9, 1)], MIX[1:]):
        actual = attend(backend, lengths, layers)
        torch.testing.assert_close(actual, attend(ReferenceAttention(), lengths, layers), rtol=1e-2, atol=1e-2)
    assert package.plans == ["prefill", "decode", "decode", "prefill"]
    assert len(backend._wrappers) == 2


UNSUITED = {
    "int8 KV": {"kv_dtype": torch.int8},
    "fp32": {"kv_dtype": torch.float32, "dtype": torch.float32},
    "KV of another type": {"kv_dtype": torch.bfloat16},
    "a head size of 80": {"dim": 80},
}


@pytest.mark.parametrize("form", UNSUITED.values(), ids=UNSUITED.keys())
def test_what_flashinfer_does_not_take_goes_the_torch_way(form: dict[str, object]) -> None:
    backend, package = flashinfer()
    layers = [AttentionParams(0.2), AttentionParams(0.2, 3)]
    actual = attend(backend, MIX, layers, **form)  # type: ignore[arg-type]
    assert torch.equal(actual, attend(ReferenceAttention(), MIX, layers, **form))  # type: ignore[arg-type]
    assert package.plans == package.runs == []


def test_what_is_unsuited_is_named() -> None:
    kv = torch.empty(1, 2, 1, 4, 2, 80, dtype=torch.bfloat16)
    assert unsuited(kv, torch.bfloat16) == "FlashInfer takes no head size of 80"
    assert unsuited(kv, torch.float16) == "FlashInfer takes no bfloat16 KV cache with float16 queries"
    assert unsuited(kv.to(torch.int8), torch.float16) == "FlashInfer takes no int8 KV cache"
    assert unsuited(kv[..., :64], torch.bfloat16) is None


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "flashinfer", raising=False)
    with pytest.raises(FlashInferUnavailable, match="flashinfer-python is not installed"):
        load_flashinfer()
