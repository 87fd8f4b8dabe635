"""A prefill side's connections to its decode sides: handshake, messages to and from the engine thread, loss, hanging.

Our end of a connection closes only once the engine has dropped all that was asked over it and its last copy has ended:
that is how the other side knows that its memory isn't written any more. Lives on the asyncio loop.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from functools import partial

import msgspec

from backends.engines.base import PeerId, SplitPrefillEngine
from backends.protocol.messages import Pair, Paired, PairRefused, ToPrefill
from backends.server.engine_thread import EngineThread
from backends.server.pair_socket import receive_pair
from backends.server.peer_line import PeerLine

logger = logging.getLogger(__name__)
Line = PeerLine[ToPrefill]


class DecodePeers:
    """One connection a name; a new one takes the place of the old."""

    def __init__(self, engine: SplitPrefillEngine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._current: dict[str, Line] = {}
        self._numbers = itertools.count(1)

    async def connect(self, name: str, sock: socket.socket) -> None:
        try:
            pair, kv_memory_fd = await receive_pair(sock)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("decode side %s did not introduce itself: %s", name, error)
            sock.close()
            return
        if (old := self._current.get(name)) is not None:
            self._drop(old)
        peer = PeerId(name, next(self._numbers))
        line: Line = PeerLine(peer, self._thread, pair.lease_seconds, lambda: self._hung(line))
        self._current[name] = line
        await line.open(
            sock,
            ToPrefill,
            received=partial(self._received, line),
            lost=lambda _: self._drop(line),
            ended=lambda: self._drop(line),
        )
        if self._current.get(name) is line:
            self._thread.post(partial(self._pair, line, pair, kv_memory_fd))
        elif kv_memory_fd is not None:  # gone already
            os.close(kv_memory_fd)

    def _received(self, line: Line, message: ToPrefill) -> None:
        if self._current.get(line.peer.name) is line:
            self._thread.post(partial(self._engine.peer_message, line.peer, message))

    def _hung(self, line: Line) -> None:
        logger.warning("decode side %s hangs: it said nothing for %g seconds", line.peer.name, line.lease_seconds)
        self._drop(line)
        line.judge_no_more()  # a step under way may keep us from letting go for longer than the peer's lease

    def _drop(self, line: Line) -> None:
        if self._current.get(line.peer.name) is line:
            del self._current[line.peer.name]
            line.stop()
            self._thread.post(partial(self._unpair, line))

    # ---------------------------------------------------------------------------------------- in the engine thread

    def _pair(self, line: Line, pair: Pair, kv_memory_fd: int | None) -> None:
        """The engine maps the memory; the descriptor is closed here, whatever it says."""
        try:
            reason = self._engine.pair(line.peer, pair, kv_memory_fd, line.outlet.send)
        finally:
            if kv_memory_fd is not None:
                os.close(kv_memory_fd)
        if reason is not None:
            logger.warning("refused to pair with decode side %s: %s", line.peer.name, reason)
            line.outlet.send(PairRefused(reason=reason))
            return
        line.outlet.send(Paired(info=self._engine.info))

    def _unpair(self, line: Line) -> None:
        self._engine.unpair(line.peer)
        line.close_from_thread()
