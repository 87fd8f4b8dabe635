"""Whether a model of transformers computes the same over the paged cache as by itself, found by trying. No files.

Replacing attention loses whatever a model expresses by its mask or beside it. A wrong answer would look like any
other, so a model is served only if its layers ask for what the cache can hold, and a short text run through the cache
in two steps gives the logits of the model's own attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.attention.base import AttentionParams, PagedStep, QuerySpan
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.models.hf import HFModel
from backends.models.spec import ModelLoadError

NUM_PROBE_TOKENS = 12
MIN_SIMILARITY = 0.99  # of logits by either attention; in bf16 they differ by rounding
_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@torch.inference_mode()
def probe(model: HFModel, config: Any, device: str) -> CacheShape:
    name = config.model_type
    try:
        shape = _cache_shape(model, config, device)
        similarity = _similarity(model, shape, device)
    except ModelLoadError as error:
        raise ModelLoadError(f"{name} models can't be served over a paged cache: {error}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ModelLoadError(f"{name} models don't run over a paged cache: {error!r}") from error
    if not similarity >= MIN_SIMILARITY:  # NaN included
        raise ModelLoadError(
            f"{name} models can't be served over a paged cache: logits differ from those of the model's own attention "
            f"(cosine similarity {similarity:.3f})."
        )
    return shape


# --------------------------------------------------------------------------------------------- what layers ask for


@dataclass(slots=True)
class _Recorder:
    """Stands in for the cache in one forward, and writes down each layer's KV shape and window."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        if layer in self.shapes:
            raise ModelLoadError(f"layer {layer} computes attention twice in a step.")
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = params.sliding_window
        return torch.zeros_like(query)


def _cache_shape(model: HFModel, config: Any, device: str) -> CacheShape:
    """Found by asking the model rather than its config."""
    recorder = _Recorder()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    logits = model.forward(zero, zero, recorder, zero)
    num_layers = config.num_hidden_layers
    if sorted(recorder.shapes) != list(range(num_layers)):
        raise ModelLoadError(
            f"{len(recorder.shapes)} of {num_layers} layers let their attention be replaced; "
            f"recurrent, shared or special layers aren't supported."
        )
    shapes = set(recorder.shapes.values())
    if len(shapes) != 1 or any(key_dim != value_dim for _, key_dim, value_dim in shapes):
        raise ModelLoadError(
            f"the cache holds one shape of key and value for all layers; this model has "
            f"(KV heads, key size, value size) {sorted(shapes)}."
        )
    if reason := unseen_masks(config, [recorder.windows[layer] for layer in range(num_layers)]):
        raise ModelLoadError(reason)
    num_kv_heads, head_dim, _ = shapes.pop()
    return CacheShape(num_layers, num_kv_heads, head_dim, logits.shape[-1])


def unseen_masks(config: Any, windows: Sequence[int | None]) -> str | None:
    """What the config says about masks and attention isn't told; a short text would not show it."""
    if getattr(config, "attention_chunk_size", None):
        return "attention in chunks isn't supported."
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        unknown = sorted(set(kinds) - set(_WINDOWED))
        if unknown:
            return f"layers of type {', '.join(unknown)} aren't supported."
        wanted = [_WINDOWED[kind] for kind in kinds]
    else:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        wanted = [bool(windowed)] * len(windows)
    if wanted != [window is not None for window in windows]:
        return "its layers don't pass their sliding window on to attention."
    return None


# ------------------------------------------------------------------------------------------------ the same logits


def _similarity(model: HFModel, shape: CacheShape, device: str) -> float:
    token_ids = (torch.arange(NUM_PROBE_TOKENS, device=device) * 7919 + 11) % shape.vocab_size
    expected = model.own_logits(token_ids)
    kv = torch.empty(
        (shape.num_layers, 2, 1, NUM_PROBE_TOKENS, shape.num_kv_heads, shape.head_dim),
        dtype=expected.dtype,
        device=device,
    )
    middle = NUM_PROBE_TOKENS // 2 + 1
    parts = [_step(model, token_ids, kv, start, stop) for start, stop in ((0, middle), (middle, NUM_PROBE_TOKENS))]
    return float(F.cosine_similarity(torch.cat(parts).float(), expected.float(), dim=-1).min())


def _step(model: HFModel, token_ids: Tensor, kv: Tensor, start: int, stop: int) -> Tensor:
    positions = torch.arange(start, stop, device=token_ids.device)
    step = PagedStep((QuerySpan(0, stop - start, start, [0]),), positions)
    attention = PagedAttention(kv, step, ReferenceAttention())
    return model.forward(token_ids[start:stop], positions, attention, positions - start)
