"""The connection between a decode and a prefill side: handshake, messages to and from the engine thread, loss.

The decode side speaks first: `Pair`, and beside it the descriptor of its KV memory. Lives on the asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import msgspec

from backends.engines.base import SplitDecodeEngine, SplitPrefillEngine
from backends.protocol.framing import Decoder, Encoder
from backends.protocol.link import FrameLink, open_link
from backends.protocol.messages import FromPrefill, Pair, Paired, PairRefused, PeerState, ToPrefill
from backends.server.engine_thread import EngineThread, Outlet

logger = logging.getLogger(__name__)
MAX_PAIR_BYTES = 1024 * 1024
T = TypeVar("T")


class _Connection(Generic[T]):
    """One peer socket: a link for the loop and an outlet for the engine thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._link: FrameLink[T] | None = None
        self.outlet = Outlet(asyncio.get_running_loop(), self._write)
        self.paired = False
        thread.add_outlet(self.outlet)

    async def open(
        self, sock: socket.socket, union: object, received: Callable[[T], None], lost: Callable[[str], None]
    ) -> None:
        self._link = await open_link(sock, union, received=received, lost=lost)

    def _write(self, frames: bytes) -> None:
        if self._link is not None:
            self._link.write(frames)

    def close(self) -> None:
        self._thread.remove_outlet(self.outlet)
        if self._link is not None:
            self._link.close()


class DecodePeer:
    """The decode side's end. At most one prefill side at a time; a new one takes the place of the old."""

    def __init__(self, engine: SplitDecodeEngine, thread: EngineThread, report: Callable[[PeerState], None]) -> None:
        self._engine = engine
        self._thread = thread
        self._report = report
        self._current: _Connection[FromPrefill] | None = None

    async def connect(self, sock: socket.socket) -> None:
        self._drop("another prefill side took its place")
        connection: _Connection[FromPrefill] = _Connection(self._thread)
        self._current = connection
        pair = Pair(info=self._engine.info, kv_memory_bytes=self._engine.kv_memory_bytes)
        try:
            socket.send_fds(sock, [Encoder().encode(pair)], [self._engine.kv_memory_fd])
        except OSError as error:
            sock.close()
            self._lost(connection, str(error))
            return
        received = partial(self._received, connection)
        await connection.open(sock, FromPrefill, received, partial(self._lost, connection))

    def _received(self, connection: _Connection[FromPrefill], message: FromPrefill) -> None:
        if connection is not self._current:
            return
        match message:
            case Paired(info=info):
                connection.paired = True
                self._thread.post(partial(self._engine.peer_connected, connection.outlet, info))
                self._report(PeerState(connected=True))
            case PairRefused(reason=reason):
                self._drop(reason)
            case _:
                self._thread.post(partial(self._engine.peer_message, message))

    def _lost(self, connection: _Connection[FromPrefill], reason: str) -> None:
        if connection is self._current:
            self._drop(f"the prefill side is gone: {reason}")

    def _drop(self, reason: str) -> None:
        connection, self._current = self._current, None
        if connection is None:
            return
        connection.close()
        if connection.paired:
            self._thread.post(partial(self._engine.peer_lost, reason))
        logger.info("not paired any more: %s", reason)
        self._report(PeerState(connected=False, reason=reason))


class PrefillPeer:
    """The prefill side's end. At most one decode side at a time; a new one takes the place of the old."""

    def __init__(self, engine: SplitPrefillEngine, thread: EngineThread) -> None:
        self._engine = engine
        self._thread = thread
        self._current: _Connection[ToPrefill] | None = None

    async def connect(self, sock: socket.socket) -> None:
        self._drop()
        connection: _Connection[ToPrefill] = _Connection(self._thread)
        self._current = connection
        try:
            pair, kv_memory_fd = await receive_pair(sock)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("no decode side introduced itself: %s", error)
            sock.close()
            self._lost(connection, "")
            return
        received = partial(self._received, connection)
        await connection.open(sock, ToPrefill, received, partial(self._lost, connection))
        self._thread.post(partial(self._pair, connection, pair, kv_memory_fd))

    def _pair(self, connection: _Connection[ToPrefill], pair: Pair, kv_memory_fd: int) -> None:
        """In the engine thread. The engine maps the memory; the descriptor is closed here, whatever it says."""
        try:
            reason = self._engine.pair(
                pair.info,
                kv_memory_fd,
                pair.kv_memory_bytes,
                connection.outlet.send,
                protocol_version=pair.protocol_version,
            )
        finally:
            os.close(kv_memory_fd)
        if reason is not None:
            logger.warning("refused to pair with decode side %s: %s", pair.info.pid, reason)
            connection.outlet.send(PairRefused(reason=reason))
            return
        connection.outlet.send(Paired(info=self._engine.info))

    def _received(self, connection: _Connection[ToPrefill], message: ToPrefill) -> None:
        if connection is self._current:
            self._thread.post(partial(self._engine.peer_message, message))

    def _lost(self, connection: _Connection[ToPrefill], _reason: str) -> None:
        if connection is self._current:
            self._drop()

    def _drop(self) -> None:
        connection, self._current = self._current, None
        if connection is not None:
            connection.close()
            self._thread.post(self._engine.unpair)


async def receive_pair(sock: socket.socket) -> tuple[Pair, int]:
    """The first message of a decode side, and the descriptor that came beside it. Nothing follows it unasked."""
    sock.setblocking(False)
    decoder: Decoder[ToPrefill] = Decoder(ToPrefill)
    descriptors: list[int] = []
    try:
        for _ in range(MAX_PAIR_BYTES // 4096):
            await _readable(sock)
            data, received, _, _ = socket.recv_fds(sock, 4096, 1)
            descriptors += received
            if not data:
                raise ConnectionError("it closed the connection")
            for message in decoder.feed(data):
                if not isinstance(message, Pair) or not descriptors:
                    raise ConnectionError("its first message is not a Pair with a descriptor")
                os.set_inheritable(descriptors[0], False)
                return message, descriptors.pop(0)
        raise ConnectionError("its first message has no end")
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(sock, readable)
    try:
        await future
    finally:
        loop.remove_reader(sock)
