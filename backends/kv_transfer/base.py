"""The verbs by which KV moves from one instance's cache into another's.

A decode side has a `KVMemory` that prefill sides write to; a prefill side gets a `KVConnector` into it from what the
decode side's `Pair` says. A connector only copies one layer's slots of one request, in the caller's thread;
`TransferPool` decides when and where. Knows nothing of requests, engines or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from backends.protocol.messages import Pair


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

    backend: str  # the transfer backend by which it is reached; goes into `Pair.transfer_backend`
    num_bytes: int
    fd: int = -1  # travels beside `Pair`; -1 = none does, or it is closed
    metadata: bytes = b""  # what else a peer needs to reach it; goes into `Pair.kv_memory_metadata`, opaque to others

    def prefault(self, block_ids: Sequence[int]) -> None:
        """A hint that peers will write to these blocks soon. Never blocks, never raises; may do nothing."""
        return

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
