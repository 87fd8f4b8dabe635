"""A Hugging Face folder -> a model ready to compute. Chooses the code that computes it; knows no cache, no requests."""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.models.base import CausalModel, LoadedModel
from backends.models.dense_config import fits_dense_decoder
from backends.models.dense_loader import load_dense
from backends.models.dtypes import activation_dtype
from backends.models.hf_loader import load_hf
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
) -> LoadedModel:
    """Raises `ModelLoadError` for a folder that is incomplete, or a model that this engine can't serve faithfully."""
    config = _read_json(path / "config.json")
    effective = activation_dtype(dtype, device)
    parts = _load(path, config, device=device, dtype=effective, weight_dtype=weight_dtype)
    _return_freed_memory()
    length, length_notices = _model_len(config, max_model_len)
    spec = ModelSpec(
        num_layers=parts.num_layers,
        num_kv_heads=parts.num_kv_heads,
        head_dim=parts.head_dim,
        vocab_size=parts.vocab_size,
        max_model_len=length,
        dtype=effective,
        weight_dtype=parts.weight_dtype,
        fingerprint=fingerprint(path),
        eos_token_ids=_eos_token_ids(path, config),
        device=device,
        default_sampling=_default_sampling(path),
        notices=parts.notices + length_notices,
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


def _load(path: Path, config: dict[str, Any], *, device: str, dtype: str, weight_dtype: str) -> _Parts:
    if fits_dense_decoder(config):
        dense = load_dense(path, config, device=device, dtype=dtype, weight_dtype=weight_dtype)
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
    model, shape = load_hf(path, device=device, dtype=dtype, weight_dtype=weight_dtype)
    return _Parts(model, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.vocab_size, dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}: it isn't a Hugging Face model folder.") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} isn't valid JSON ({error}); fetch the model again.") from None
    return content


def _model_len(config: dict[str, Any], asked: int | None) -> tuple[int, tuple[str, ...]]:
    """The context that can be used: what is asked for, up to what the model was made for."""
    text = config.get("text_config") or config
    own, why = text.get("max_position_embeddings") or text.get("n_positions"), "the model's context"
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        # beyond it the frequencies change with the longest sequence of a batch, so answers would depend on others
        own = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or own
        why = "the context whose rotary embedding doesn't depend on the batch"
    if own is None:
        if asked is None:
            raise ModelLoadError("config.json doesn't say how long the model's context is; set max_model_len.")
        return asked, ()
    if asked is None or asked <= own:
        return asked or own, ()
    return own, (f"max_model_len {asked} is beyond {why}, {own}; {own} is used.",)


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
