"""What the rest of an engine needs to know of a loaded model. No torch."""

from __future__ import annotations

from msgspec import Struct


class ModelLoadError(Exception):
    """A model that can't be served: what is wrong with it and what to do."""


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Sizes and facts of a loaded model; data types by their names in `backends.config`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str  # of activations: "fp32", "bf16" or "fp16"
    weight_dtype: str  # what decode multiplies with: "fp32", "bf16", "fp16", "int8" or "int4"
    fingerprint: str  # same weights and config <=> same string
    eos_token_ids: frozenset[int] = frozenset()
    device: str = "cpu"
    default_sampling: tuple[tuple[str, float], ...] = ()  # what the model's generation_config.json advises
    rope_scaling: str = ""  # how `max_model_len` extends the context beyond the model's own; "" = it doesn't
    native_max_model_len: int = 0  # the model's own; 0 = unknown
    notices: tuple[str, ...] = ()  # what was adjusted or assumed
