"""What low-bit weights and an int8 KV cache cost the bundled model, in perplexity and in logits. `-s` shows it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_helpers import Driver, make_request
from torch import Tensor

from backends.attention.compiled import CompiledAttention
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.models.base import LoadedModel
from backends.models.loader import load_model
from backends.models.native_step import DecodeRows, make_native_step
from backends.models.packed_weights import PackedStore
from backends.models.store import resolve_model
from backends.native import library
from backends.protocol.messages import SamplingParams, TextPrompt
from backends.text.tokenizer import TextCodec
from backends.worker.input_batch import InputBatch, build_input_batch

pytestmark = pytest.mark.slow
CHUNK = 128
NO_FILES = PackedStore(Path("/nowhere"), min_model_bytes=sys.maxsize)  # four gigabytes of them, for one test
TEXT = Path(__file__).with_name("quality_text.txt")
BOUND = 0.01  # of the perplexity, between any two of the ways below


@cache
def text_ids() -> tuple[int, ...]:
    tokenizer = TextCodec.load(resolve_model("smollm2"))
    return tuple(tokenizer.encode_prompt(TextPrompt(text=TEXT.read_text(encoding="utf-8"))))


@cache
def bundled(dtype: str, weight_dtype: str) -> LoadedModel:
    return load_model(resolve_model("smollm2"), dtype=dtype, weight_dtype=weight_dtype, store=NO_FILES)


def all_logits(loaded: LoadedModel, ids: Sequence[int], kv_dtype: str, num_single: int = 0) -> Tensor:
    """After every token: chunks through the cache, then `num_single` tokens one a step, as they are decoded."""
    driver = Driver(loaded, num_blocks=len(ids) // 16 + 2, kv_dtype=kv_dtype)
    request = make_request(ids, SamplingParams(temperature=0))
    parts: list[Tensor] = []
    with torch.inference_mode():
        while (start := request.num_computed_tokens) < len(ids):
            num_chunked = len(ids) - num_single - start
            item = driver.schedule(request, min(CHUNK, num_chunked) if num_chunked > 0 else 1)
            batch = build_input_batch([item], driver.cache.block_size, "cpu")
            parts.append(_step(loaded, driver.cache.tensor, batch, single=num_chunked <= 0).float())
            request.num_computed_tokens += item.num_tokens
    return torch.cat(parts)


def _step(loaded: LoadedModel, kv: Tensor, batch: InputBatch, *, single: bool) -> Tensor:
    if single and library.available():
        rows = DecodeRows(
            batch.token_ids, batch.positions, batch.step.slot_mapping, [span.block_ids for span in batch.step.spans]
        )
        return decode_step(loaded, kv).logits(rows)
    attention = PagedAttention(kv, batch.step, CompiledAttention() if library.available() else ReferenceAttention())
    return loaded.model.forward(batch.token_ids, batch.positions, attention, torch.arange(len(batch.token_ids)))


decode_step = cache(make_native_step)


def show(what: str, figures: dict[str, float]) -> None:
    sys.stdout.write(f"\n{what}\n")
    for name, value in figures.items():
        sys.stdout.write(f"  {name}: {value:.4f}\n")


def perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    return float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp())


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return all_logits(bundled("fp32", "fp32"), text_ids(), "fp32")


def test_perplexity_stays_within_one_percent(exact: Tensor) -> None:
    """`auto` serves the GGUF's own values, so even the weights cost no more than rounding of activations to bf16."""
    ids = text_ids()
    served = bundled("bf16", "auto")
    assert served.spec.weight_dtype == "int4"
    found = {
        "fp32 weights, fp32 KV": perplexity(exact, ids),
        "int4 weights, bf16 KV": perplexity(all_logits(served, ids, "bf16", num_single=256), ids),
        "int4 weights, int8 KV": perplexity(all_logits(served, ids, "int8", num_single=256), ids),
        "fp32 weights, int8 KV": perplexity(all_logits(bundled("fp32", "fp32"), ids, "int8"), ids),
    }
    show(f"perplexity of {len(ids)} tokens", found)

    assert max(found.values()) < (1 + BOUND) * min(found.values())
    assert 5 < found["fp32 weights, fp32 KV"] < 40  # a text that the model can read, but not recite


def test_four_bit_weights_are_the_dequantized_model_up_to_rounding_in_bf16(exact: Tensor) -> None:
    """Their logits are as close to those of fp32 as the same weights' are when all is computed in bf16."""
    ids = text_ids()[:96]
    low_bit = all_logits(bundled("bf16", "auto"), ids, "fp32", num_single=64)
    rounded = all_logits(bundled("bf16", "bf16"), ids, "fp32", num_single=64)
    distance = {
        name: float((logits - exact[: len(ids)])[-64:].abs().mean() / exact[: len(ids)].std())
        for name, logits in (("int4", low_bit), ("bf16", rounded))
    }
    show("mean distance of 64 steps' logits from fp32, in standard deviations", distance)

    assert distance["int4"] < 1.25 * distance["bf16"]
    assert distance["bf16"] < 0.02
