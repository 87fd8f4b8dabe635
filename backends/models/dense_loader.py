"""Builds the dense decoder from a Hugging Face folder. Knows the names of its tensors; no requests, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.attention.base import AttentionParams
from backends.models.dense import DenseLayer, DenseModel, DenseWeights
from backends.models.dense_config import DenseConfig, read_dense_config, rotary_frequencies
from backends.models.linear import with_step_form
from backends.models.linear_loader import LinearLoader, plan_weights
from backends.models.packed_weights import Loaded, PackedStore
from backends.models.spec import ModelLoadError
from backends.models.tensor_file import Parts
from backends.models.weights import QuantizedFiles, WeightFiles


@dataclass(frozen=True, slots=True)
class DenseParts:
    model: DenseModel
    config: DenseConfig
    weight_dtype: str  # effective
    notices: tuple[str, ...]


def load_dense(
    folder: Path, config: dict[str, Any], *, device: str, dtype: str, weight_dtype: str, store: PackedStore
) -> DenseParts:
    dense = read_dense_config(config)
    quantized = QuantizedFiles(folder)
    plan = plan_weights(dtype=dtype, weight_dtype=weight_dtype, device=device, has_own_values=bool(quantized))

    def make_parts(for_file: bool) -> Parts:
        return _parts(LinearLoader(WeightFiles(folder), quantized, plan), dense, for_file=for_file)

    if torch.device(device).type == "cpu":
        shape = replace(dense, max_position_embeddings=0)  # the length changes no weight
        choice = {"dtype": dtype, "weight_dtype": plan.weight_dtype, "plan": repr((plan, shape))}
        loaded = store.load(folder, choice, make_parts)
    else:
        loaded = Loaded(dict(make_parts(False)))
    parts = loaded.parts
    frequencies, factor = rotary_frequencies(config, dense.head_dim)
    weights = DenseWeights(
        embedding=parts["embedding"],
        layers=tuple(parts[f"layer {index}"] for index in range(dense.num_layers)),
        norm=parts["norm"],
        head=parts["head"],
        rotary_frequencies=frequencies.to(device),
        rotary_factor=factor,
    )
    notices = plan.notices + tuple(parts["notices"]) + loaded.notices
    return DenseParts(DenseModel(dense, weights), dense, plan.weight_dtype, notices)


def _parts(loader: LinearLoader, config: DenseConfig, *, for_file: bool) -> Parts:
    """One after the other, each complete. The embedding stays until the end, as the head of a tied model is the same.

    `for_file`: with the forms that only some processes use.
    """
    complete = with_step_form if for_file else lambda linear: linear
    embedding_name = "model.embed_tokens.weight"
    embedding = loader.vector(embedding_name)
    yield "embedding", embedding
    for index in range(config.num_layers):
        yield f"layer {index}", _layer(loader, config, index).with_products(complete)
    yield "norm", loader.vector("model.norm.weight")
    tied = config.tie_word_embeddings
    yield "head", complete(loader.head(embedding_name if tied else "lm_head.weight", embedding if tied else None))
    _refuse_unknown(loader.unread(), config)
    yield "notices", loader.notices()


def _layer(loader: LinearLoader, config: DenseConfig, index: int) -> DenseLayer:
    at = f"model.layers.{index}."
    input_norm = loader.vector(f"{at}input_layernorm.weight")
    key_sizes = None
    if f"{at}self_attn.k_proj.bias" in loader:
        weight, bias = (loader.vector(f"{at}self_attn.k_proj.{part}") for part in ("weight", "bias"))
        key_sizes = sizes_of_keys(weight * input_norm, bias, config.head_dim)
    return DenseLayer(
        input_norm=input_norm,
        qkv=loader.linear([f"{at}self_attn.{part}_proj" for part in "qkv"]),
        qk_norm=_qk_norm(loader, config, at) if config.has_qk_norm else None,
        output=loader.linear([f"{at}self_attn.o_proj"]),
        post_norm=loader.vector(f"{at}post_attention_layernorm.weight"),
        gate_up=loader.linear([f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]),
        down=loader.linear([f"{at}mlp.down_proj"]),
        attention=AttentionParams(config.head_dim**-0.5, config.sliding_windows[index], key_sizes=key_sizes),
    )


def sizes_of_keys(weight: Tensor, bias: Tensor, head_dim: int) -> Tensor:
    """How large each element of a key is likely to be beside the others, as a power of two: [num_kv_heads, head_dim].

    Biases of some families (Qwen 2) make a few elements of every key many times the others; in eight bits, with one
    scale for all, the others would lose most of theirs. Rotation turns an element of a head's first half and its
    counterpart in the second into one another, so both get the same size.
    """
    likely = bias.float().abs() + 3 * weight.float().norm(dim=1)  # three standard deviations for a normed input
    first, second = likely.view(-1, 2, head_dim // 2).unbind(1)
    pairs = torch.hypot(first, second)
    relative = pairs / pairs.mean(dim=1, keepdim=True)
    return torch.exp2(relative.clamp(2**-10, 2**10).log2().round()).repeat(1, 2)


def _qk_norm(loader: LinearLoader, config: DenseConfig, at: str) -> Tensor:
    """Each query head has the same weight, and each key head another one."""
    query = loader.vector(f"{at}self_attn.q_norm.weight").expand(config.num_heads, -1)
    key = loader.vector(f"{at}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((query, key))


def _refuse_unknown(names: Sequence[str], config: DenseConfig) -> None:
    """A tensor that the family doesn't have belongs to a model that this code would compute wrongly."""
    ignored = ["rotary_emb.inv_freq"] + (["lm_head.weight"] if config.tie_word_embeddings else [])
    unknown = [name for name in names if not name.endswith(tuple(ignored))]
    if unknown:
        raise ModelLoadError(
            f"The weights hold {len(unknown)} tensors that a {config.family} model doesn't have, "
            f"such as {unknown[0]!r}."
        )
