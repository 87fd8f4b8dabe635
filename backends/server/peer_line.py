"""The connection to one peer: a link for the loop, an outlet for the engine thread, heartbeats out, a lease in.

Heartbeats say that the engine thread is alive, not only this loop: one that is stuck says nothing, while one in a long
step goes on saying so as long as it computes. A process that was stopped and goes on finds every lease run out; so a
peer is judged only a moment later, when what has come meanwhile was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from backends.engines.base import PeerId
from backends.engines.split.lease import Lease
from backends.protocol.link import FrameLink, open_link
from backends.protocol.messages import Heartbeat
from backends.server.engine_thread import EngineThread, Liveness, Outlet

logger = logging.getLogger(__name__)
SECOND_LOOK_SECONDS = 0.05  # enough for the loop to read what is there
T = TypeVar("T")


class PeerLine(Generic[T]):
    """One peer's socket. `hung` is called once, when its lease has run out."""

    def __init__(self, peer: PeerId, thread: EngineThread, lease_seconds: float, hung: Callable[[], None]) -> None:
        self.peer = peer
        self.paired = False
        self._loop = asyncio.get_running_loop()
        self._thread = thread
        self._liveness = Liveness(thread.pulse)
        self._lease = Lease.begin(lease_seconds, self._loop.time())
        self._hung = hung
        self._judges = True
        self._timer: asyncio.TimerHandle | None = None
        self._link: FrameLink[T] | None = None
        self.outlet = Outlet(self._loop, self._write)
        thread.add_outlet(self.outlet)

    @property
    def lease_seconds(self) -> float:
        return self._lease.seconds

    async def open(
        self,
        sock: socket.socket,
        union: object,
        *,
        received: Callable[[T], None],
        lost: Callable[[str], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        def heard(message: T) -> None:
            self._lease.heard(self._loop.time())
            if not isinstance(message, Heartbeat):
                received(message)

        self._link = await open_link(sock, union, received=heard, lost=lost, ended=ended)
        self._tick()

    def stop(self) -> None:
        """Neither speak for the engine nor judge the peer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def judge_no_more(self) -> None:
        """Only speak for the engine, until the line closes: the peer may wake up and wait for us to let go."""
        self._judges = False
        if self._timer is None:
            self._tick()

    def finish(self) -> None:
        """Ask the peer to let go; it is heard until it has."""
        self.stop()
        if self._link is not None:
            self._link.finish()

    def close(self) -> None:
        self.stop()
        self._thread.remove_outlet(self.outlet)
        if self._link is not None:
            self._link.close()

    def close_from_thread(self) -> None:
        """For the engine thread, once it has let go of all that came over this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self.close)

    def _write(self, frames: bytes) -> None:
        if self._link is not None:
            self._link.write(frames)

    def _tick(self) -> None:
        now = self._loop.time()
        if self._judges and self._lease.is_expired(now):
            self._timer = self._loop.call_later(SECOND_LOOK_SECONDS, self._judge)
            return
        if self._lease.beat_is_due(now) and self._liveness.moved() and self._link is not None:
            self._link.send(Heartbeat())
        deadline = self._lease.next_deadline() if self._judges else self._lease.next_beat_at
        self._timer = self._loop.call_at(deadline, self._tick)

    def _judge(self) -> None:
        if not self._lease.is_expired(self._loop.time()):
            self._tick()
            return
        self.stop()
        self._hung()
