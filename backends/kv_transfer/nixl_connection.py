"""A connection to one peer's agent, that several threads write over. Knows nothing of layers and blocks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

from backends.kv_transfer.base import TransferError
from backends.kv_transfer.nixl_agent import Descriptors, MemoryKind


class Agent(Protocol):
    """What is used of `NixlAgent`."""

    def register(self, kind: MemoryKind, address: int, num_bytes: int, device: int) -> Any: ...

    def deregister(self, regions: Any) -> None: ...

    def metadata(self) -> bytes: ...

    def connect(self, metadata: bytes) -> Any: ...

    def disconnect(self, peer: Any) -> None: ...

    def write(
        self,
        peer: Any,
        source: Side,
        target: Side,
        *,
        timeout_seconds: float,
        gone: threading.Event,
    ) -> None: ...


MakeAgent = Callable[[str, MemoryKind], Agent]  # its name, and where its memory is
Side = tuple[MemoryKind, Descriptors]


class Connection:
    """To a peer, until a write over it fails.

    It is ended then: only so it is certain that nothing more is written to blocks that the peer may give to others.
    """

    def __init__(self, agent: Agent, metadata: bytes) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._num_writes = 0
        self._peer: Any = agent.connect(metadata)
        self.gone = threading.Event()

    def write(self, source: Side, target: Side, timeout_seconds: float) -> None:
        """Raises TransferError, and has ended then."""
        with self._changed:
            if self.gone.is_set():
                raise TransferError("the connection to the decode instance's memory has ended")
            self._num_writes += 1
        try:
            self._agent.write(self._peer, source, target, timeout_seconds=timeout_seconds, gone=self.gone)
        except OSError:
            self.gone.set()
            raise
        finally:
            with self._changed:
                self._num_writes -= 1
                self._changed.notify_all()
            if self.gone.is_set():
                self.end()

    def end(self) -> None:
        """Waits until no thread writes; on return the peer is let go of."""
        self.gone.set()  # writes that wait for the peer see it
        with self._changed:
            self._changed.wait_for(lambda: self._num_writes == 0)
            peer, self._peer = self._peer, None
            if peer is not None:
                attempt(self._agent.disconnect, peer)


def attempt(function: Callable[[Any], None], argument: Any) -> None:
    """The other end, or the memory, may be gone already."""
    with contextlib.suppress(TransferError):
        function(argument)
