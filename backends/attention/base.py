"""What attention over the paged cache looks like to a model. Knows nothing of requests, schedulers or weights.

A step's rows are the new tokens of all its requests, one request after the other. A backend is asked once a step to
`prepare`, and then once a layer to `attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The rows of one request in a step: rows [row, row + num_tokens) are its tokens from position `start` on."""

    row: int
    num_tokens: int
    start: int
    block_ids: Sequence[int]  # in order, enough for every position before `stop`

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where the rows of one step live in the cache."""

    spans: tuple[QuerySpan, ...]
    slot_mapping: Tensor  # int64 [num_rows]: the slot each row writes


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What differs between the layers of a model. A row sees itself and the `sliding_window - 1` tokens before it."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    # fp32 [num_kv_heads, head_dim], powers of two: how large the elements of a key are beside one another, where that
    # is known to differ much. An int8 cache holds keys divided by it, and queries are multiplied instead.
    key_sizes: Tensor | None = None


class PreparedAttention(Protocol):
    """Attention of one step; the cache already holds the layer's new KV."""

    def attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        """`query` [num_rows, num_heads, head_dim] -> the same shape, contiguous."""


class AttentionBackend(Protocol):
    """A way to compute attention: gather and matrix products everywhere, or a kernel of one device."""

    def prepare(self, kv: Tensor, step: PagedStep) -> PreparedAttention:
        """`kv` is [num_layers, 2, num_blocks, block_size, num_kv_heads, row], rows as in `kv_rows`."""
