"""What every engine looks like to the server that drives it. Knows nothing of sockets.

One thread owns an engine and is the only one to call it. An engine never blocks in these calls except while a step
computes. What it has to say leaves through `emit`, in order, from inside the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.engines.split.peer import PeerId
from backends.protocol.messages import EngineInfo, EngineStats, FromEngine, FromPrefill, Pair, ToPrefill

__all__ = [
    "Emit",
    "EmitPeer",
    "Engine",
    "PeerId",
    "PeerLink",
    "RequestRefused",
    "SplitDecodeEngine",
    "SplitPrefillEngine",
]

Emit = Callable[[FromEngine], None]


class Engine(Protocol):
    """A merged engine or a decode side: takes requests of the gateway."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request) -> None:
        """Admit a request: emits `Accepted`, or raises `RequestRefused` and keeps nothing."""

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; nothing more is emitted for it. Unknown ids are ignored."""

    def step(self) -> bool:
        """Advance by one step. False: nothing could be done, wait for the next call or `next_deadline`."""

    def next_deadline(self) -> float | None:
        """When (monotonic) `step` must be called again even if nothing arrives; None = only when something does."""

    def stats(self) -> EngineStats: ...

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None: ...

    def num_unfinished(self) -> int: ...

    def close(self) -> None: ...


class PeerLink(Protocol):
    """The decode side's way to a prefill side: sends without blocking."""

    def send(self, message: ToPrefill) -> None: ...


class SplitDecodeEngine(Engine, Protocol):
    """A decode side: an engine that also hears from its prefill sides."""

    @property
    def kv_memory_fd(self) -> int:
        """Travels beside `pair_message`; -1 = nothing does."""

    def pair_message(self) -> Pair:
        """How it introduces itself to a prefill side."""

    def peer_connected(self, peer: PeerId, link: PeerLink, info: EngineInfo) -> None: ...

    def peer_message(self, peer: PeerId, message: FromPrefill) -> None: ...

    def peer_hung(self, peer: PeerId, reason: str) -> None:
        """The prefill side isn't counted on any more, but may still write: the blocks it was lent stay held."""

    def peer_lost(self, peer: PeerId, reason: str) -> None:
        """The prefill side is gone and writes no more: the blocks it was lent may be reused."""


EmitPeer = Callable[[FromPrefill], None]


class SplitPrefillEngine(Protocol):
    """A prefill side: takes `Prefill`s of paired decode sides."""

    @property
    def info(self) -> EngineInfo: ...

    def pair(self, peer: PeerId, pair: Pair, kv_memory_fd: int | None, emit: EmitPeer) -> str | None:
        """Map the decode side's KV memory. Returns why not, if version, backend, block size, dtype or model differ.

        The descriptor, if one came with the message, stays the caller's.
        """

    def unpair(self, peer: PeerId) -> None:
        """The decode side is gone: drop its requests, wait for running copies, unmap. Unknown ones are ignored."""

    def peer_message(self, peer: PeerId, message: ToPrefill) -> None: ...

    def step(self) -> bool: ...

    def next_deadline(self) -> float | None: ...

    def stats(self) -> EngineStats: ...

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None: ...

    def num_unfinished(self) -> int: ...

    def close(self) -> None: ...
