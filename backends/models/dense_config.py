"""The config.json of a Llama, Mistral, Qwen 2 or Qwen 3 model as the dense decoder needs it. No tensors of weights.

Read without transformers, whose import takes longer than loading a small model; only scaled rotary embeddings ask it.
Values that a config leaves out mean what transformers' config classes say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.models.context import rope_parameters, rope_type
from backends.models.spec import ModelLoadError

# What a left out value means, where the families differ. None for `head_dim`: hidden_size / num_attention_heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "head_dim": None, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
SEQUENCE_DEPENDENT_ROPE = ("dynamic", "longrope")  # the frequencies depend on the longest sequence of a batch


@dataclass(frozen=True, slots=True)
class DenseConfig:
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # by layer

    @property
    def has_qk_norm(self) -> bool:
        return self.family == "qwen3"


def fits_dense_decoder(config: dict[str, Any]) -> bool:
    """Whether the model is exactly one of the families; anything unusual is left to transformers' own code."""
    architectures = config.get("architectures") or ["ForCausalLM"]
    rope = rope_parameters(config)
    return (
        config.get("model_type") in FAMILIES
        and str(architectures[0]).endswith("ForCausalLM")
        and config.get("hidden_act", "silu") == "silu"
        and rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) in (None, 1, 1.0)
        and rope_type(rope) not in SEQUENCE_DEPENDENT_ROPE
        and not config.get("quantization_config")
        and not config.get("auto_map")
    )


def read_dense_config(config: dict[str, Any]) -> DenseConfig:
    family = config["model_type"]
    values = FAMILIES[family] | config
    try:
        num_heads = values["num_attention_heads"]
        return DenseConfig(
            family=family,
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=values["num_key_value_heads"] or num_heads,
            head_dim=values["head_dim"] or values["hidden_size"] // num_heads,
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            sliding_windows=_sliding_windows(family, values),
        )
    except KeyError as error:
        raise ModelLoadError(f"config.json has no {error.args[0]!r}, without which the model can't be built.") from None


def _sliding_windows(family: str, values: dict[str, Any]) -> tuple[int | None, ...]:
    num_layers: int = values["num_hidden_layers"]
    window: int | None = values.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not values.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = values.get("layer_types") or [
        "sliding_attention" if layer >= values["max_window_layers"] else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


# -------------------------------------------------------------------------------------------------- rotary embedding


def rotary_frequencies(config: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """fp32 [head_dim / 2], and the factor on cos and sin that some scalings have."""
    rope = rope_parameters(config)
    if rope_type(rope) != "default":
        return _scaled_frequencies(config, rope_type(rope))
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    return 1.0 / (theta**exponents), 1.0


def _scaled_frequencies(config: dict[str, Any], kind: str) -> tuple[Tensor, float]:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  (a second, and only for the models that need it)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise ModelLoadError(f"config.json asks for rotary embeddings of type {kind!r}; known are {known}.")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](CONFIG_MAPPING[config["model_type"]].from_dict(config))
    return frequencies, float(factor)
