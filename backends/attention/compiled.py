"""Paged attention with the compiled kernels, where they apply; everything else goes the torch way.

Single tokens (decode) read their keys and values where they lie, which after 4,096 tokens takes a fraction of the time
of gathering them first. Prompt chunks in bf16 keep scores out of memory: two to three times the speed of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep, PreparedAttention, QuerySpan
from backends.attention.reference import Part, StepInParts, first_visible, plan_tiles
from backends.native.library import can_prefill, paged_attention, paged_prefill


class CompiledAttention(AttentionBackend):
    @override
    def prepare(self, kv: Tensor, step: PagedStep) -> PreparedAttention:
        return StepInParts(kv, step, _plan)


def _plan(spans: Sequence[QuerySpan], kv: Tensor, window: int | None, plain: bool) -> list[Part]:
    chunks = [span for span in spans if span.num_tokens > 1]
    single = [span for span in spans if span.num_tokens == 1]
    parts: list[Part] = [_Chunk(span, window) for span in chunks] if plain else plan_tiles(chunks, kv, window)
    return [*parts, _SingleRows(single, window)] if single else parts


class _Chunk(Part):
    """A prompt chunk of one request; the kernel doesn't cap scores."""

    def __init__(self, span: QuerySpan, window: int | None) -> None:
        self.rows: Tensor | slice = slice(span.row, span.row + span.num_tokens)
        self._span = span
        self._window = window
        self._table = torch.tensor(span.block_ids, dtype=torch.int32)
        self._tiles: Part | None = None

    @override
    def attend(self, kv: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        if not can_prefill(query, kv):
            self._tiles = self._tiles or plan_tiles([self._span], kv.unsqueeze(0), self._window)[0]
            return self._tiles.attend(kv, query, params)
        return paged_prefill(
            query,
            (kv[0], kv[1]),
            self._table,
            start=self._span.start,
            scale=params.scale,
            window=self._window,
            num_threads=torch.get_num_threads(),
        )


class _SingleRows(Part):
    """The newest tokens of some requests, one row each."""

    def __init__(self, spans: Sequence[QuerySpan], window: int | None) -> None:
        rows = [span.row for span in spans]
        in_a_run = rows == list(range(rows[0], rows[0] + len(rows)))
        self.rows: Tensor | slice = slice(rows[0], rows[0] + len(rows)) if in_a_run else torch.tensor(rows)
        self._first = torch.tensor([first_visible(span.start, window) for span in spans], dtype=torch.int32)
        self._last = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        self._tables = torch.zeros(len(spans), max(len(span.block_ids) for span in spans), dtype=torch.int32)
        for table, span in zip(self._tables, spans, strict=True):
            table[: len(span.block_ids)] = torch.tensor(span.block_ids, dtype=torch.int32)

    @override
    def attend(self, kv: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        return paged_attention(
            query,
            (kv[0], kv[1]),
            self._tables,
            (self._first, self._last),
            scale=params.scale,
            softcap=params.softcap or 0.0,
            num_threads=torch.get_num_threads(),
        )
