"""What a context stretched by RoPE scaling costs the bundled model on a short text, in perplexity. `-s` shows it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_helpers import Driver, make_request

from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.models.base import LoadedModel
from backends.models.context import plan_context
from backends.models.dense import DenseModel
from backends.models.dense_config import rotary_frequencies
from backends.models.loader import load_model
from backends.models.store import resolve_model
from backends.protocol.messages import SamplingParams, TextPrompt
from backends.text.tokenizer import TextCodec
from backends.worker.input_batch import build_input_batch

pytestmark = pytest.mark.slow
NUM_TOKENS, CHUNK = 320, 320
TEXT = Path(__file__).with_name("quality_text.txt")
CONFIG = {"model_type": "llama", "max_position_embeddings": 8192, "rope_theta": 100_000.0, "head_dim": 64}
BOUNDS = {2: 1.06, 4: 1.16}  # of the perplexity, against the model in its own context


def stretched(loaded: LoadedModel, factor: int) -> LoadedModel:
    """The same weights; loading them once for each factor would take longer than the test."""
    assert isinstance(loaded.model, DenseModel)
    plan = plan_context(CONFIG, 8192 * factor)
    sizes = {"hidden_size": 576, "num_attention_heads": 9}
    frequencies, attention_factor = rotary_frequencies(plan.applied(CONFIG | sizes), 64)
    weights = dataclasses.replace(loaded.model.weights, rotary_frequencies=frequencies, rotary_factor=attention_factor)
    return LoadedModel(DenseModel(loaded.model.config, weights), loaded.spec)


def perplexity(loaded: LoadedModel, ids: list[int]) -> float:
    driver = Driver(loaded, num_blocks=len(ids) // 16 + 2)
    request = make_request(ids, SamplingParams(temperature=0))
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        while request.num_computed_tokens < len(ids):
            item = driver.schedule(request, min(CHUNK, len(ids) - request.num_computed_tokens))
            batch = build_input_batch([item], driver.cache.block_size, "cpu")
            attention = PagedAttention(driver.cache.tensor, batch.step, ReferenceAttention())
            rows = torch.arange(len(batch.token_ids))
            parts.append(loaded.model.forward(batch.token_ids, batch.positions, attention, rows).float())
            request.num_computed_tokens += item.num_tokens
    return float(F.cross_entropy(torch.cat(parts)[:-1], torch.tensor(ids[1:])).exp())


def test_a_stretched_context_costs_short_texts_little() -> None:
    path = resolve_model("smollm2")
    ids = TextCodec.load(path).encode_prompt(TextPrompt(text=TEXT.read_text(encoding="utf-8")))[:NUM_TOKENS]
    loaded = load_model(path, dtype="bf16")
    own = perplexity(loaded, ids)
    found = {factor: perplexity(stretched(loaded, factor), ids) for factor in BOUNDS}
    sys.stdout.write(f"\nperplexity of {len(ids)} tokens: {own:.3f}; by factor: {found}\n")
    for factor, bound in BOUNDS.items():
        assert own < found[factor] < bound * own
