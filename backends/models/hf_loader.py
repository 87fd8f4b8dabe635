"""Loads a causal LM through transformers, with its attention replaced. Knows no requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.models.context import EXTENDABLE, RopeScaling, rope_type
from backends.models.dtypes import TORCH_DTYPES
from backends.models.hf import ATTENTION_NAME, HFModel, StepHolder, paged_attention_forward
from backends.models.hf_probe import CacheShape, probe
from backends.models.spec import ModelLoadError


def load_hf(
    folder: Path, *, device: str, dtype: str, weight_dtype: str, scaling: RopeScaling | None = None
) -> tuple[HFModel, CacheShape]:
    if weight_dtype not in ("auto", dtype):
        raise ModelLoadError(
            f"weight_dtype {weight_dtype!r} is for Llama, Mistral, Qwen 2 and Qwen 3 models; "
            f"this one takes 'auto' or its dtype, {dtype!r}."
        )
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (a second, and only for models that need it)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if scaling is not None:
            _stretch(config.get_text_config(), scaling)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=TORCH_DTYPES[dtype], attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"transformers can't load {folder} as a causal language model: {error}") from error
    if scaling is not None:
        _check_stretched(model)
    model = model.to(device).eval()
    holder = StepHolder()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kvgate_step = holder
    served = HFModel(model, holder)
    return served, probe(served, model.config.get_text_config(), device)


def _stretch(text_config: Any, scaling: RopeScaling) -> None:
    own = getattr(text_config, "rope_parameters", None) or {}
    if not own or any(isinstance(value, dict) for value in own.values()) or rope_type(own) not in EXTENDABLE:
        raise _cannot_stretch(text_config.model_type)
    text_config.rope_parameters = scaling.parameters(own)


def _check_stretched(model: Any) -> None:
    """Some models compute their rotary embedding in a way of their own, which doesn't ask the config."""
    kinds = {module.rope_type for module in model.modules() if hasattr(module, "rope_type")}
    if kinds != {"yarn"}:
        raise _cannot_stretch(model.config.get_text_config().model_type)


def _cannot_stretch(name: str) -> ModelLoadError:
    return ModelLoadError(
        f"max_model_len is beyond the context of this model, and {name} models have no rotary embedding that could be "
        f"extended. Set max_model_len to the model's own context or less."
    )
