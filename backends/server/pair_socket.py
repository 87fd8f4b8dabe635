"""The first message on a new connection, read before a link owns the socket: a descriptor may come beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from backends.protocol.framing import Decoder
from backends.protocol.messages import Pair, ToPrefill

MAX_PAIR_BYTES = 1024 * 1024
HEADER_BYTES = 4  # of a frame: the length of what follows


async def receive_pair(sock: socket.socket) -> tuple[Pair, int | None]:
    """A decode side's introduction, and the descriptor that came beside it. Nothing follows it unasked."""
    sock.setblocking(False)
    descriptors: list[int] = []
    try:
        message = await _first_message(sock, descriptors)
        if not isinstance(message, Pair):
            raise ConnectionError("its first message is not a Pair")
        if not descriptors:
            return message, None
        os.set_inheritable(descriptors[0], False)
        return message, descriptors.pop(0)
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


async def _first_message(sock: socket.socket, descriptors: list[int]) -> ToPrefill:
    """Not a byte more is read: what follows is the link's."""
    header = await _receive(sock, HEADER_BYTES, descriptors)
    num_bytes = int.from_bytes(header, "little")
    if num_bytes > MAX_PAIR_BYTES:
        raise ConnectionError(f"its first message announces {num_bytes} bytes")
    decoder: Decoder[ToPrefill] = Decoder(ToPrefill)
    (message,) = decoder.feed(header + await _receive(sock, num_bytes, descriptors))
    return message


async def _receive(sock: socket.socket, num_bytes: int, descriptors: list[int]) -> bytes:
    data = b""
    while len(data) < num_bytes:
        await _readable(sock)
        part, received, _, _ = socket.recv_fds(sock, num_bytes - len(data), 1)
        descriptors += received
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


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
