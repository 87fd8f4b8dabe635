"""One step's attention, as a model calls it: write the new KV, tell whoever moves KV, attend. Knows no model.

kv: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; index 0 of the second axis is K, 1 is V.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep

OnLayer = Callable[[int], None]


class PagedAttention:
    """Attention over the paged cache for the rows of one step."""

    def __init__(self, kv: Tensor, step: PagedStep, backend: AttentionBackend, on_layer: OnLayer | None = None) -> None:
        num_layers, _, num_blocks, block_size, num_kv_heads, head_dim = kv.shape
        self.num_layers = num_layers
        self._slots = kv.view(num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim)
        self._slot_mapping = step.slot_mapping
        self._prepared = backend.prepare(kv, step)
        self._on_layer = on_layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """query [rows, num_heads, head_dim], key and value [rows, num_kv_heads, head_dim] -> like query."""
        slots = self._slots[layer]
        slots[0].index_copy_(0, self._slot_mapping, key.to(slots.dtype))
        slots[1].index_copy_(0, self._slot_mapping, value.to(slots.dtype))
        if self._on_layer is not None:
            self._on_layer(layer)
        return self._prepared.attend(layer, query, params)
