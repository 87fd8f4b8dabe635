"""One step's attention, as a model calls it: write the new KV, tell whoever moves KV, attend. Knows no model.

kv: [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, row], rows as in `kv_rows`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep
from backends.attention.kv_rows import write_rows

OnLayer = Callable[[int], None]


class PagedAttention:
    """Attention over the paged cache for the rows of one step."""

    def __init__(self, kv: Tensor, step: PagedStep, backend: AttentionBackend, on_layer: OnLayer | None = None) -> None:
        self.num_layers = kv.shape[0]
        self._slots = kv.flatten(2, 3)  # a view
        self._slot_mapping = step.slot_mapping
        self._prepared = backend.prepare(kv, step)
        self._on_layer = on_layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """query [rows, num_heads, head_dim], key and value [rows, num_kv_heads, head_dim] -> like query."""
        slots = self._slots[layer]
        if params.key_sizes is not None and slots.dtype == torch.int8:
            query, key = even_out(query, key, params.key_sizes)
        write_rows(slots[0], self._slot_mapping, key)
        write_rows(slots[1], self._slot_mapping, value)
        if self._on_layer is not None:
            self._on_layer(layer)
        return self._prepared.attend(layer, query, params)


def even_out(query: Tensor, key: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Changes no score: each element's factor in the query is taken from the key."""
    group = query.shape[1] // key.shape[1]
    return query * sizes.repeat_interleave(group, dim=0).to(query.dtype), key / sizes.to(key.dtype)
