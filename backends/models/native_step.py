"""A dense model's decode step by the compiled kernels: the same weights and cache, one call for all layers.

For steps in which every request advances by one token. Everything else goes through the model's torch code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from backends.models.base import LoadedModel
from backends.models.dense import DenseLayer, DenseModel, DenseWeights
from backends.models.linear import Linear, PlainLinear, WideLinear, step_form
from backends.native import library
from backends.native.library import (
    DTYPES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_ROWS,
    CLayer,
    CMatrix,
    CModel,
    DenseStep,
    PackedMatrix,
    StepRows,
)

# Rows of a step that the kernel takes, MAX_ROWS at a time, before torch's products over all rows win: what is likely
# where `row_choice` has not measured it.
MAX_STEP_ROWS = 4 * MAX_ROWS


class StepUnavailable(Exception):
    """Why a model's decode steps go through torch."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token of each request, in order."""

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    block_ids: Sequence[Sequence[int]]


class DecodeStep(Protocol):
    """Computes a step of single tokens."""

    max_rows: int

    def logits(self, rows: DecodeRows) -> Tensor:
        """[rows, vocab_size]; the rows' KV is then in the cache."""


class NativeStep(DecodeStep):
    def __init__(self, weights: DenseWeights, step: DenseStep, max_rows: int = MAX_STEP_ROWS) -> None:
        self.max_rows = max_rows
        self._weights = weights
        self._step = step

    def first_layer(self, kv: Tensor) -> NativeStep:
        """The same weights' first layer over another cache, almost without a head: for measuring."""
        return NativeStep(self._weights, self._step.first_layer(kv))

    @override
    def logits(self, rows: DecodeRows) -> Tensor:
        parts = [self._part(rows, begin) for begin in range(0, len(rows.token_ids), MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, rows: DecodeRows, begin: int) -> Tensor:
        part = slice(begin, begin + MAX_ROWS)
        positions = rows.positions[part]
        cos, sin = self._weights.rotation(positions)
        return self._step.run(
            StepRows(
                hidden=F.embedding(rows.token_ids[part], self._weights.embedding).float(),
                cos=torch.cat((cos, cos), dim=1),
                sin=torch.cat((sin, sin), dim=1),
                positions=positions.int(),
                slots=rows.slots[part].contiguous(),
                block_tables=_table(rows.block_ids[part]),
            ),
            num_threads=torch.get_num_threads(),
        )


def _table(block_ids: Sequence[Sequence[int]]) -> Tensor:
    """int32 [rows, longest]; what lies beyond a row's own blocks is never read."""
    longest = max(map(len, block_ids))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in block_ids], dtype=torch.int32)


def make_native_step(loaded: LoadedModel, kv: Tensor) -> NativeStep:
    """Raises StepUnavailable, saying why, for a model, device or machine that the kernels don't cover."""
    missing = library.unavailable_reason()
    if kv.device.type != "cpu" or not isinstance(loaded.model, DenseModel):
        raise StepUnavailable("the compiled decode step is for dense models on a CPU")
    if missing:
        raise StepUnavailable(missing)
    return NativeStep(loaded.model.weights, _build(loaded.model, kv))


def _build(model: DenseModel, kv: Tensor) -> DenseStep:
    config, weights = model.config, model.weights
    _check(model, kv)
    keep: list[object] = [kv]
    layers = (CLayer * config.num_layers)(
        *(_layer(layer, model, keep, even_keys=kv.dtype == torch.int8) for layer in weights.layers)
    )
    final_norm = _floats(weights.norm, keep)
    keep.append(layers)
    c_model = CModel(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        block_size=kv.shape[3],
        kv_dtype=DTYPES[kv.dtype],
        eps=config.rms_norm_eps,
        scale=weights.layers[0].attention.scale,
        layer_stride=kv.stride(0),
        value_offset=kv.stride(1),
        slot_stride=kv.stride(3),
        cache=kv.data_ptr(),
        final_norm=final_norm,
        head=_matrix(weights.head, keep),
        layers=layers,
    )
    return DenseStep(c_model, keep)


def _check(model: DenseModel, kv: Tensor) -> None:
    config = model.config
    if kv.dtype not in DTYPES or config.head_dim > MAX_HEAD_DIM or config.num_heads // config.num_kv_heads > MAX_GROUP:
        raise StepUnavailable(f"head_dim {config.head_dim} or KV dtype {kv.dtype} is beyond the compiled decode step")
    if config.vocab_size % 16:
        raise StepUnavailable(f"a vocabulary of {config.vocab_size} is no multiple of 16")


def _layer(layer: DenseLayer, model: DenseModel, keep: list[object], *, even_keys: bool) -> CLayer:
    sizes = layer.attention.key_sizes
    heads = model.config.num_heads
    query_norm = key_norm = None
    if layer.qk_norm is not None:
        query_norm, key_norm = _floats(layer.qk_norm[0], keep), _floats(layer.qk_norm[heads], keep)
    return CLayer(
        input_norm=_floats(layer.input_norm, keep),
        post_norm=_floats(layer.post_norm, keep),
        query_norm=query_norm,
        key_norm=key_norm,
        qkv=_matrix(layer.qkv, keep),
        output=_matrix(layer.output, keep),
        gate_up=_matrix(layer.gate_up, keep),
        down=_matrix(layer.down, keep),
        window=layer.attention.sliding_window or 0,
        key_sizes=_floats(sizes, keep) if even_keys and sizes is not None else None,
    )


def _floats(vector: Tensor, keep: list[object]) -> int:
    floats = vector.float().contiguous()
    keep.append(floats)
    return floats.data_ptr()


def _matrix(linear: Linear, keep: list[object]) -> CMatrix:
    packed = _packed(linear)
    keep.append(packed)
    return packed.descriptor()


def _packed(linear: Linear) -> PackedMatrix:
    packed = step_form(linear)
    if packed is not None:
        return packed
    if isinstance(linear, PlainLinear | WideLinear) and linear.weight.dtype in (torch.bfloat16, torch.float32):
        raise StepUnavailable(f"a weight of {tuple(linear.weight.shape)} is no multiple of 16 x 32")
    raise StepUnavailable("the weights have a form that the compiled decode step doesn't take")
