"""A Hugging Face folder -> a model ready to compute. Chooses the code that computes it; knows no cache, no requests."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.models.base import CausalModel, LoadedModel
from backends.models.context import ContextPlan, plan_context
from backends.models.dense_config import fits_dense_decoder
from backends.models.dense_loader import load_dense
from backends.models.dtypes import activation_dtype
from backends.models.hf_loader import load_hf
from backends.models.packed_weights import PackedStore, default_store
from backends.models.spec import ModelLoadError, ModelSpec
from backends.models.weights import fingerprint

ADVISED_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    weight_dtype: str = "auto",
    max_model_len: int | None = None,
    store: PackedStore | None = None,
) -> LoadedModel:
    """Raises `ModelLoadError` for a folder that is incomplete, or a model that this engine can't serve faithfully.

    `store`: where packed weights are kept for the other processes and the next start; None = in the user's cache.
    """
    config = _read_json(path / "config.json")
    context = plan_context(config, max_model_len)
    effective = activation_dtype(dtype, device)
    parts = _load(
        path, config, context, device=device, dtype=effective, weight_dtype=weight_dtype, store=store or default_store()
    )
    _return_freed_memory()
    if not context.length:
        raise ModelLoadError("config.json doesn't say how long the model's context is; set max_model_len.")
    scaling = str(context.scaling or "")
    spec = ModelSpec(
        num_layers=parts.num_layers,
        num_kv_heads=parts.num_kv_heads,
        head_dim=parts.head_dim,
        vocab_size=parts.vocab_size,
        max_model_len=context.length,
        dtype=effective,
        weight_dtype=parts.weight_dtype,
        fingerprint=f"{fingerprint(path)}, {scaling}" if scaling else fingerprint(path),
        eos_token_ids=_eos_token_ids(path, config),
        device=device,
        default_sampling=_default_sampling(path),
        rope_scaling=scaling,
        native_max_model_len=context.native_len,
        notices=parts.notices + context.notices,
    )
    return LoadedModel(parts.model, spec)


def _return_freed_memory() -> None:
    """glibc keeps what conversions freed, 70 to 270 MB after loading a model of 135M parameters."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@dataclass(frozen=True, slots=True)
class _Parts:
    model: CausalModel
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    weight_dtype: str
    notices: tuple[str, ...] = ()


def _load(
    path: Path,
    config: dict[str, Any],
    context: ContextPlan,
    *,
    device: str,
    dtype: str,
    weight_dtype: str,
    store: PackedStore,
) -> _Parts:
    if fits_dense_decoder(config):
        stretched = context.applied(config)
        dense = load_dense(path, stretched, device=device, dtype=dtype, weight_dtype=weight_dtype, store=store)
        sizes = dense.config
        return _Parts(
            dense.model,
            sizes.num_layers,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.vocab_size,
            dense.weight_dtype,
            dense.notices,
        )
    model, shape = load_hf(path, device=device, dtype=dtype, weight_dtype=weight_dtype, scaling=context.scaling)
    return _Parts(model, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.vocab_size, dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: it isn't a Hugging Face model folder.") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} isn't valid JSON ({error}); fetch the model again.") from None
    return content


def _default_sampling(path: Path) -> tuple[tuple[str, float], ...]:
    """Sampling that the model's authors advise, for requests that say nothing; as vLLM takes it."""
    file = path / "generation_config.json"
    content = _read_json(file) if file.is_file() else {}
    values = {name: content.get(name) for name in ADVISED_SAMPLING}
    return tuple((name, float(value)) for name, value in values.items() if isinstance(value, int | float))


def _eos_token_ids(path: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = path / "generation_config.json"
    sources = [config, config.get("text_config") or {}, _read_json(generation) if generation.is_file() else {}]
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
