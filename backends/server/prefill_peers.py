"""A decode side's connections to its prefill sides: handshake, messages to and from the engine thread, loss, hanging.

The decode side speaks first: `Pair`, and beside it the descriptor of its KV memory. A prefill side that was paired may
write to that memory until its end of the connection closes, and so it is heard until then, whatever becomes of it here:
a prefill side that lives closes its end only once its last copy has ended. Lives on the asyncio loop.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable
from functools import partial

from backends.engines.base import PeerId, SplitDecodeEngine
from backends.protocol.framing import Encoder
from backends.protocol.messages import FromPrefill, Pair, Paired, PairRefused, PeerState
from backends.server.engine_thread import EngineThread
from backends.server.peer_line import PeerLine

logger = logging.getLogger(__name__)
Line = PeerLine[FromPrefill]


class PrefillPeers:
    """One connection a name; a new one takes the place of the old. `report` tells the gateway."""

    def __init__(self, engine: SplitDecodeEngine, thread: EngineThread, report: Callable[[PeerState], None]) -> None:
        self._engine = engine
        self._thread = thread
        self._report = report
        self._current: dict[str, Line] = {}
        self._numbers = itertools.count(1)

    async def connect(self, name: str, sock: socket.socket) -> None:
        self._replace(name)
        pair = self._engine.pair_message()
        peer = PeerId(name, next(self._numbers))
        line: Line = PeerLine(peer, self._thread, pair.lease_seconds, lambda: self._hung(line))
        self._current[name] = line
        try:
            send_pair(sock, pair, self._engine.kv_memory_fd)
        except OSError as error:
            sock.close()
            self._lost(line, str(error))
            return
        await line.open(sock, FromPrefill, received=partial(self._received, line), lost=partial(self._lost, line))
        if not self._is_current(line):  # replaced meanwhile
            line.close()

    def _received(self, line: Line, message: FromPrefill) -> None:
        match message:
            case Paired(info=info):
                if self._is_current(line):
                    line.paired = True
                    self._thread.post(partial(self._engine.peer_connected, line.peer, line.outlet, info))
                    self._report(PeerState(connected=True, peer=line.peer.name))
            case PairRefused(reason=reason):
                self._end(line, reason)
            case _:
                if line.paired:
                    self._thread.post(partial(self._engine.peer_message, line.peer, message))

    def _hung(self, line: Line) -> None:
        """Only its process' end gives back what it was lent, unless it wakes up and reads that it isn't wanted."""
        reason = f"it said nothing for {line.lease_seconds:g} seconds"
        logger.warning("prefill side %s hangs: %s", line.peer.name, reason)
        self._give_up(line, reason)
        if self._is_current(line):
            self._report(PeerState(connected=False, reason=reason, peer=line.peer.name, hung=True))

    def _lost(self, line: Line, reason: str) -> None:
        self._end(line, f"the prefill side is gone: {reason}")

    def _replace(self, name: str) -> None:
        line = self._current.pop(name, None)
        if line is None:
            return
        reason = "another prefill side took its place"
        self._give_up(line, reason)
        if not line.paired:  # it was lent nothing
            line.close()
        self._report(PeerState(connected=False, reason=reason, peer=name))

    def _give_up(self, line: Line, reason: str) -> None:
        line.finish()
        if line.paired:
            self._thread.post(partial(self._engine.peer_hung, line.peer, reason))

    def _end(self, line: Line, reason: str) -> None:
        line.close()
        if line.paired:
            line.paired = False
            self._thread.post(partial(self._engine.peer_lost, line.peer, reason))
        if self._is_current(line):
            del self._current[line.peer.name]
            logger.info("not paired with %s any more: %s", line.peer.name, reason)
            self._report(PeerState(connected=False, reason=reason, peer=line.peer.name))

    def _is_current(self, line: Line) -> bool:
        return self._current.get(line.peer.name) is line


def send_pair(sock: socket.socket, pair: Pair, kv_memory_fd: int) -> None:
    """The first message on a new connection, which no socket is too full for."""
    frame = Encoder().encode(pair)
    if kv_memory_fd >= 0:
        socket.send_fds(sock, [frame], [kv_memory_fd])
    else:
        sock.sendall(frame)
