"""One end of a frame connection on an asyncio loop. Knows nothing of what messages mean, nor who is at the other."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from typing_extensions import override

from backends.protocol.framing import Decoder, Encoder, FrameTooLarge

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The other end is a process of ours on this host. One that has read nothing for this long is not slow but stuck.
MAX_UNREAD_BYTES = 512 * 1024 * 1024


class FrameLink(asyncio.Protocol, Generic[T]):
    """Hands over each message as it arrives, and says once when the connection has ended.

    Sending never waits: bytes the other end has not read are kept, up to `MAX_UNREAD_BYTES`; then the link is cut.
    With `ended`, the other end's last word ends only its half: that is told, and whoever hears it closes the link.
    """

    def __init__(
        self,
        union: Any,
        *,
        received: Callable[[T], None],
        lost: Callable[[str], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._decoder: Decoder[T] = Decoder(union)
        self._encoder = Encoder()
        self._received = received
        self._lost = lost
        self._ended = ended
        self._finished = False
        self._transport: asyncio.Transport | None = None
        self._fault: str | None = None
        self._closed = asyncio.Event()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                self._received(message)
        except (FrameTooLarge, msgspec.MsgspecError) as error:
            self._cut(f"it sent something that is not a message of ours: {error}")

    @override
    def eof_received(self) -> bool:
        if self._ended is None:
            return False  # the transport closes itself
        self._ended()
        return True

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed.set()
        self._lost(self._fault or (str(exc) if exc else "its connection ended"))

    def send(self, message: msgspec.Struct) -> None:
        self.write(self._encoder.encode(message))

    def write(self, frames: bytes) -> None:
        """Send whole frames, encoded before. After the end of the connection, or `finish`, this does nothing."""
        if self._transport is None or self._finished:
            return
        self._transport.write(frames)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._cut("it does not read what is sent to it")

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def closed(self) -> None:
        """Wait until the connection has ended and `lost` was called."""
        await self._closed.wait()

    def finish(self) -> None:
        """Send what is still kept and nothing more; the other end is heard until it ends the connection."""
        if self._transport is not None and not self._finished:
            self._finished = True
            self._transport.write_eof()

    def close(self) -> None:
        """Send what is still kept, then end the connection."""
        if self._transport is not None:
            self._transport.close()

    def _cut(self, fault: str) -> None:
        self._fault = self._fault or fault
        if self._transport is not None:
            self._transport.abort()


async def open_link(
    sock: socket.socket,
    union: Any,
    *,
    received: Callable[[T], None],
    lost: Callable[[str], None],
    ended: Callable[[], None] | None = None,
) -> FrameLink[T]:
    """Put a connected socket on the running loop. The link owns the socket from now on."""
    sock.setblocking(False)
    link: FrameLink[T] = FrameLink(union, received=received, lost=lost, ended=ended)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
    return link
