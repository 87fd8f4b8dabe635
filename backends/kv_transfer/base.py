"""The verbs by which KV moves from one instance's cache into another's, and how its time is counted.

A decode side has a `KVMemory` that prefill sides write to; a prefill side gets a `KVConnector` into it from what the
decode side's `Pair` says. A connector only copies one layer's slots of one request, in the caller's thread;
`TransferPool` decides when and where. Knows nothing of requests, engines or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from backends.protocol.messages import Pair

Interval = tuple[float, float]  # start, end; seconds on one clock


class TransferError(OSError):
    """KV can't be moved: the peer's memory can't be reached, or not any more. Says what happened."""


class KVLayout(NamedTuple):
    """Shape of a KV pool in bytes: [num_layers, 2 (K, V), num_blocks, bytes_per_block]."""

    num_layers: int
    num_blocks: int
    bytes_per_block: int  # of one layer's K or V, scales included

    @property
    def num_bytes(self) -> int:
        return self.num_layers * 2 * self.num_blocks * self.bytes_per_block


class KVMemory(Protocol):
    """The decode side's KV memory, which peers write to: a `KVLayout`."""

    @property
    def backend(self) -> str:
        """The transfer backend by which it is reached; goes into `Pair.transfer_backend`."""

    @property
    def fd(self) -> int:
        """Travels beside `Pair`; -1 = none does."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def metadata(self) -> bytes:
        """What else a peer needs to reach it; goes into `Pair.kv_memory_metadata`. Opaque to all but the backend."""

    def prefault(self, block_ids: Sequence[int]) -> None:
        """A hint that peers will write to these blocks soon. Never blocks, never raises; may do nothing."""

    def close(self) -> None:
        """Peers can't reach it any more. Doing it again does nothing."""


class KVConnector(Protocol):
    """A way into the peer's KV memory."""

    @property
    def num_layers(self) -> int: ...

    def mark(self) -> object | None:
        """In the computing thread, with KV just computed or queued to be: what `wait_for` must wait for before a copy.

        None where memory holds what was computed as soon as the computing call returns, as on a CPU.
        """
        return None

    def wait_for(self, mark: object) -> None:
        """In a copying thread: return once what the mark stands for is in the cache."""
        return

    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        """Copy the KV of tokens [start, stop) of one layer, and return the bytes moved once they are there.

        Both lists are block tables: entry i holds the tokens [i * block_size, (i + 1) * block_size); they must not be
        changed afterwards. Slots outside the range are neither read nor written.

        Several threads may copy at once. A copy may block without the interpreter lock, but never for ever: a peer that
        is gone is an error (`TransferError`).
        """

    def save_kv_layers(
        self,
        layers: Sequence[int],
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        start: int,
        stop: int,
    ) -> int:
        """The same of several layers."""
        return sum(self.save_kv_layer(layer, source_block_ids, target_block_ids, start, stop) for layer in layers)

    def close(self) -> None:
        """Let go of the peer's memory. No copy may be running."""


# On the prefill side: a way into the memory of the decode side that sent this `Pair`. The descriptor that came beside
# it stays the caller's. Raises OSError or ValueError with the reason why there is no way.
Connect = Callable[[Pair, int | None], KVConnector]


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
