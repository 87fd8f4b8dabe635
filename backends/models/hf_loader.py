"""Loads a causal LM through transformers, with its attention replaced. Knows no requests."""

from __future__ import annotations

from pathlib import Path

from backends.models.dtypes import TORCH_DTYPES
from backends.models.hf import ATTENTION_NAME, HFModel, StepHolder, paged_attention_forward
from backends.models.hf_probe import CacheShape, probe
from backends.models.spec import ModelLoadError


def load_hf(folder: Path, *, device: str, dtype: str, weight_dtype: str) -> tuple[HFModel, CacheShape]:
    if weight_dtype not in ("auto", dtype):
        raise ModelLoadError(
            f"weight_dtype {weight_dtype!r} is for Llama, Mistral, Qwen 2 and Qwen 3 models; "
            f"this one takes 'auto' or its dtype, {dtype!r}."
        )
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (a second, and only for models that need it)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=TORCH_DTYPES[dtype], attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"transformers can't load {folder} as a causal language model: {error}") from error
    model = model.to(device).eval()
    holder = StepHolder()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kvgate_step = holder
    served = HFModel(model, holder)
    return served, probe(served, model.config.get_text_config(), device)
