"""This project's own decoder for the Llama, Mistral, Qwen 2 and Qwen 3 families. Knows no files and no requests.

The rows of all requests go through every product together; only attention tells them apart. The order of operations
is that of transformers, so that fp32 results agree with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from backends.attention.base import AttentionParams
from backends.attention.paged import PagedAttention
from backends.models.base import CausalModel
from backends.models.dense_config import DenseConfig
from backends.models.linear import Linear
from backends.models.row_ops import Rotation, row_ops


@dataclass(frozen=True, slots=True)
class DenseLayer:
    input_norm: Tensor
    qkv: Linear  # rows: all query heads, all key heads, all value heads
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    attention: AttentionParams

    def with_products(self, change: Callable[[Linear], Linear]) -> DenseLayer:
        return replace(
            self,
            qkv=change(self.qkv),
            output=change(self.output),
            gate_up=change(self.gate_up),
            down=change(self.down),
        )


@dataclass(frozen=True, slots=True)
class DenseWeights:
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[DenseLayer, ...]
    norm: Tensor
    head: Linear
    rotary_frequencies: Tensor  # fp32 [head_dim / 2]
    rotary_factor: float

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [rows, head_dim / 2]. Once a step, so a table over the whole context would save nothing."""
        angles = positions.unsqueeze(1).float() * self.rotary_frequencies
        return angles.cos() * self.rotary_factor, angles.sin() * self.rotary_factor


class DenseModel(CausalModel):
    def __init__(self, config: DenseConfig, weights: DenseWeights) -> None:
        self.config = config
        self.weights = weights
        self._ops = row_ops(weights.embedding, head_dim=config.head_dim, eps=config.rms_norm_eps)
        self._num_heads = config.num_heads
        self._num_rotated_heads = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self.weights.embedding)
        rotation = self._ops.rotation(*self.weights.rotation(positions))
        for index, layer in enumerate(self.weights.layers):
            attended = self._attend(index, layer, self._ops.norm(hidden, layer.input_norm), rotation, attention)
            hidden += layer.output(attended)
            gate_up = layer.gate_up(self._ops.norm(hidden, layer.post_norm))
            hidden += layer.down(self._ops.silu_mul(gate_up))
        if rows.shape[0] == 0:  # a chunk before the prompt's end; compiled products take no empty input
            return hidden.new_empty(0, self.config.vocab_size)
        return self.weights.head(self._ops.norm(hidden[rows], self.weights.norm))

    def _attend(
        self, index: int, layer: DenseLayer, hidden: Tensor, rotation: Rotation, attention: PagedAttention
    ) -> Tensor:
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        rotated = self._ops.rotate(heads, self._num_rotated_heads, rotation, layer.qk_norm)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        value = heads[:, self._num_rotated_heads :]
        return attention(index, query, key, value, layer.attention).reshape(hidden.shape[0], -1)
