"""The verbs by which KV moves from one instance's cache into another's, and how its time is counted.

A connector only copies one layer's slots of one request, in the caller's thread; `TransferPool` decides when and where.
Knows nothing of requests, engines or sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

Interval = tuple[float, float]  # start, end; seconds on one clock


class KVConnector(Protocol):
    """A way into the peer's KV cache."""

    @property
    def num_layers(self) -> int: ...

    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        """Copy the KV of tokens [start, stop) of one layer, and return the bytes moved.

        Both lists are block tables: entry i holds the tokens [i * block_size, (i + 1) * block_size). Slots outside the
        range are neither read nor written. Several threads may copy at once.
        """

    def close(self) -> None:
        """Let go of the peer's memory. No copy may be running."""


class Run(NamedTuple):
    """Whole blocks at even steps on both sides, or one block of which only slots [first_slot, end_slot) move.

    A free list gives blocks back in the order they were freed, often downwards: hence steps, which may be negative.
    """

    source: int
    target: int
    num_blocks: int
    source_step: int
    target_step: int
    first_slot: int
    end_slot: int


def runs(
    source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int, block_size: int
) -> Iterator[Run]:
    """Tokens [start, stop) as few runs, in order."""
    pending: Run | None = None
    for index in range(start // block_size, -(-stop // block_size)):
        first_slot = max(start - index * block_size, 0)
        end_slot = min(stop - index * block_size, block_size)
        block = Run(source_block_ids[index], target_block_ids[index], 1, 1, 1, first_slot, end_slot)
        longer = _join(pending, block, block_size) if pending is not None else None
        if longer is None and pending is not None:
            yield pending
        pending = longer or block
    if pending is not None:
        yield pending


def _join(run: Run, block: Run, block_size: int) -> Run | None:
    """The run with the block at its end, or None if it doesn't follow."""
    if (run.end_slot - run.first_slot, block.end_slot - block.first_slot) != (block_size, block_size):
        return None
    if run.num_blocks == 1:
        run = run._replace(source_step=block.source - run.source, target_step=block.target - run.target)
    follows = (
        block.source == run.source + run.num_blocks * run.source_step
        and block.target == run.target + run.num_blocks * run.target_step
    )
    return run._replace(num_blocks=run.num_blocks + 1) if follows else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by any of the intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def overlapped_seconds(intervals: Iterable[Interval], window: Interval) -> float:
    """How much of the time covered by the intervals lies inside the window."""
    return covered_seconds(
        (max(start, window[0]), min(end, window[1]))
        for start, end in intervals
        if min(end, window[1]) > max(start, window[0])
    )
