"""Paged attention with nothing but torch, on every device: gather a request's KV, then matrix products or SDPA.

Prompt chunks are computed in tiles of query rows, each over the keys up to its end. That costs half of what a masked
rectangle would, and on a CPU two plain matrix products in bf16 beat SDPA's kernel by two to three times. Rows that
are one token of their request (decode) go through SDPA, with the heads that share a KV head as its query rows, so KV
is never repeated; requests of similar length are computed together.

Slots that nobody has written may hold anything, NaN included: they are never read, as a NaN times a weight of zero
would still be NaN. Padding of a group therefore points at a slot that is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from backends.attention.base import AttentionBackend, AttentionParams, PagedStep, PreparedAttention, QuerySpan
from backends.attention.kv_rows import decode_rows

TILE_ROWS = 128  # 64 and 256 are both slower on a CPU at 512 and 1,024 tokens
MAX_TILE_SCORES = 16 * 1024 * 1024  # elements of one tile's scores, for models of many heads over a long context


class Part(Protocol):
    """Attention of some rows of a step, over one layer at a time."""

    rows: Tensor | slice

    def attend(self, kv: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """kv [2, num_blocks, block_size, num_kv_heads, row]; query [len(rows), num_heads, head_dim]"""


class ReferenceAttention(AttentionBackend):
    @override
    def prepare(self, kv: Tensor, step: PagedStep) -> PreparedAttention:
        return StepInParts(kv, step, plan_with_torch)


# (spans, kv, window, decode_by_sdpa) -> what computes them
Plan = Callable[[Sequence[QuerySpan], Tensor, int | None, bool], list[Part]]


class StepInParts(PreparedAttention):
    """A step whose rows are divided among parts by a plan."""

    def __init__(self, kv: Tensor, step: PagedStep, plan: Plan) -> None:
        self._kv = kv
        self._spans = step.spans
        self._plan = plan
        self._parts: dict[tuple[int | None, bool], list[Part]] = {}

    @override
    def attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        parts = self._parts_for(params)
        kv = self._kv[layer]
        if len(parts) == 1:
            return parts[0].attend(kv, query, params)
        out = torch.empty_like(query)
        for part in parts:
            out[part.rows] = part.attend(kv, query[part.rows], params)
        return out

    def _parts_for(self, params: AttentionParams) -> list[Part]:
        """Layers with the same window share their plan: it is made once a step."""
        decode_by_sdpa = params.softcap is None  # SDPA can't cap scores
        key = (params.sliding_window, decode_by_sdpa)
        if key not in self._parts:
            self._parts[key] = self._plan(self._spans, self._kv, params.sliding_window, decode_by_sdpa)
        return self._parts[key]


def plan_with_torch(spans: Sequence[QuerySpan], kv: Tensor, window: int | None, decode_by_sdpa: bool) -> list[Part]:
    decode = [span for span in spans if span.num_tokens == 1 and decode_by_sdpa]
    parts = plan_tiles([span for span in spans if span.num_tokens > 1 or not decode_by_sdpa], kv, window)
    for group in _group_by_length(decode, window):
        # in the order of the rows, so that a group of all rows needs no reordering
        parts.append(_DecodeGroup(sorted(group, key=lambda span: span.row), kv, window))
    return parts


def plan_tiles(spans: Sequence[QuerySpan], kv: Tensor, window: int | None) -> list[Part]:
    return [_Tiles(span, kv, window) for span in spans]


# ------------------------------------------------------------------------------------------------- finding the keys


@dataclass(frozen=True, slots=True)
class _Keys:
    """How to get the K and V of positions [first, stop) of one request out of a layer's cache."""

    num_tokens: int
    offset: int  # of `first` in its block
    first_block: int
    blocks: Tensor | None  # None: the blocks lie one after the other, so no copy is needed

    @classmethod
    def of(cls, span: QuerySpan, kv: Tensor, first: int) -> _Keys:
        block_size = kv.shape[3]
        ids = list(span.block_ids[first // block_size : -(-span.stop // block_size)])
        in_a_run = ids == list(range(ids[0], ids[0] + len(ids)))
        blocks = None if in_a_run else torch.tensor(ids, device=kv.device)
        return cls(span.stop - first, first % block_size, ids[0], blocks)

    def gather(self, kv: Tensor) -> Tensor:
        """kv [2, num_blocks, block_size, num_kv_heads, row] -> [2, num_tokens, num_kv_heads, row]"""
        block_size = kv.shape[2]
        if self.blocks is None:
            first = self.first_block * block_size + self.offset
            return kv.flatten(1, 2)[:, first : first + self.num_tokens]
        return kv.index_select(1, self.blocks).flatten(1, 2)[:, self.offset : self.offset + self.num_tokens]


def first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


# --------------------------------------------------------------------------------------------- chunks, tile by tile


class _Tiles(Part):
    """A prompt chunk of one request."""

    def __init__(self, span: QuerySpan, kv: Tensor, window: int | None) -> None:
        self.rows: Tensor | slice = slice(span.row, span.row + span.num_tokens)
        self._span = span
        self._window = window
        self._first = first_visible(span.start, window)
        self._keys = _Keys.of(span, kv, self._first)

    @override
    def attend(self, kv: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = kv.shape[3]
        key, value = decode_rows(self._keys.gather(kv), query.dtype)
        keys_by_head = key.permute(1, 2, 0).contiguous()  # [num_kv_heads, head_dim, num_keys]
        values_by_head = value.transpose(0, 1).contiguous()  # [num_kv_heads, num_keys, head_dim]
        grouped = (query * params.scale).view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
        out = torch.empty_like(query).view(num_rows, num_kv_heads, -1, head_dim)
        tile_rows = max(1, min(TILE_ROWS, MAX_TILE_SCORES // (num_heads * self._keys.num_tokens)))
        for begin in range(0, num_rows, tile_rows):
            end = min(begin + tile_rows, num_rows)
            low, high = self._visible(begin, end)
            tile = grouped[:, begin:end].reshape(num_kv_heads, -1, head_dim)
            scores = torch.bmm(tile, keys_by_head[:, :, low:high])
            if params.softcap is not None:
                scores = torch.tanh(scores / params.softcap) * params.softcap
            self._mask(scores.view(num_kv_heads, end - begin, -1, high - low), begin, low)
            weights = torch.softmax(scores, dim=-1)
            tile_out = torch.bmm(weights, values_by_head[:, low:high])
            out[begin:end] = tile_out.view(num_kv_heads, end - begin, -1, head_dim).transpose(0, 1)
        return out.view(num_rows, num_heads, head_dim)

    def _visible(self, begin: int, end: int) -> tuple[int, int]:
        """The gathered keys that any of rows [begin, end) sees."""
        low = first_visible(self._span.start + begin, self._window) - self._first
        return low, self._span.start + end - self._first

    def _mask(self, scores: Tensor, begin: int, low: int) -> None:
        """scores [num_kv_heads, rows, heads per KV head, keys]: hide later tokens, and those that left the window."""
        _, num_rows, _, num_keys = scores.shape
        rows = torch.arange(num_rows, device=scores.device)[:, None, None] + self._span.start + begin
        if self._window is None:  # only the last square of a tile has anything to hide
            corner = scores[..., num_keys - num_rows :]
            keys = torch.arange(num_rows, device=scores.device) + self._span.start + begin
            corner.masked_fill_(keys > rows, float("-inf"))
            return
        keys = torch.arange(num_keys, device=scores.device) + self._first + low
        scores.masked_fill_((keys > rows) | (keys <= rows - self._window), float("-inf"))


# ---------------------------------------------------------------------------------------- single tokens, in groups


def _num_visible(span: QuerySpan, window: int | None) -> int:
    return span.stop - first_visible(span.start, window)


def _group_by_length(spans: Sequence[QuerySpan], window: int | None) -> list[list[QuerySpan]]:
    """Groups that waste little on padding: the longest has at most half as much again, and 128 tokens, more."""
    groups: list[list[QuerySpan]] = []
    shortest = 0
    for span in sorted(spans, key=lambda span: _num_visible(span, window)):
        length = _num_visible(span, window)
        if not groups or length > shortest * 1.5 + 128:
            groups.append([])
            shortest = length
        groups[-1].append(span)
    return groups


class _DecodeGroup(Part):
    """The newest tokens of some requests, one row each."""

    def __init__(self, spans: Sequence[QuerySpan], kv: Tensor, window: int | None) -> None:
        device = kv.device
        self.rows: Tensor | slice = torch.tensor([span.row for span in spans], device=device)
        self._num_requests = len(spans)
        self._keys: _Keys | None = None
        self._slots: Tensor | None = None
        self._mask: Tensor | None = None
        if len(spans) == 1:
            self.rows = slice(spans[0].row, spans[0].row + 1)
            self._keys = _Keys.of(spans[0], kv, first_visible(spans[0].start, window))
        else:
            self._slots, self._mask = _padded_slots(spans, kv, window)

    @override
    def attend(self, kv: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = kv.shape[3]
        key, value = decode_rows(self._gather(kv), query.dtype)  # [requests, num_kv_heads, keys, head_dim]
        grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self._mask, scale=params.scale)
        return out.reshape(num_rows, num_heads, head_dim)

    def _gather(self, kv: Tensor) -> Tensor:
        if self._keys is not None:
            return self._keys.gather(kv).transpose(1, 2).unsqueeze(1)
        assert self._slots is not None
        gathered = kv.flatten(1, 2).index_select(1, self._slots)
        return gathered.view(2, self._num_requests, -1, *kv.shape[3:]).transpose(2, 3)


def _padded_slots(spans: Sequence[QuerySpan], kv: Tensor, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Slots [requests * longest] and which of them count [requests, 1, 1, longest] (None: all of them)."""
    block_size = kv.shape[3]
    firsts = torch.tensor([first_visible(span.start, window) for span in spans])
    stops = torch.tensor([span.stop for span in spans])
    longest = int((stops - firsts).max())
    positions = firsts[:, None] + torch.arange(longest)
    counts = positions < stops[:, None]
    positions = torch.where(counts, positions, firsts[:, None])  # padding reads a slot that is written
    tables = torch.zeros(len(spans), int(stops.max()) // block_size + 1, dtype=torch.int64)
    for table, span in zip(tables, spans, strict=True):
        num_blocks = -(-span.stop // block_size)
        table[:num_blocks] = torch.tensor(span.block_ids[:num_blocks])
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size
    mask = None if bool(counts.all()) else counts[:, None, None, :].to(kv.device)
    return slots.flatten().to(kv.device), mask
