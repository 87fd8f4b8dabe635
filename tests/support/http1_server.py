"""A server that plays what a test says, byte by byte, and knows who is still connected."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from yarl import URL

from support.waiting import until

DEADLINE_SECONDS = 10.0


@dataclass
class Peer:
    """One connection, as the server sees it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> tuple[bytes, bytes] | None:
        """Head and body of the next one; None if the connection ends instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            return head, await self.reader.readexactly(int(lines[0].split(b":")[1]) if lines else 0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def say(self, *data: bytes) -> None:
        for piece in data:
            self.writer.write(piece)
            await self.writer.drain()

    async def end(self) -> None:
        """Wait until the other side has hung up."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


Play = Callable[[Peer], Awaitable[None]]


@dataclass
class Server:
    """`play` is what happens on each connection; it ends when that returns."""

    play: Play
    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = 0
    num_accepted: int = 0
    num_open: int = 0
    failures: list[BaseException] = field(default_factory=list)

    @property
    def url(self) -> URL:
        return URL.build(scheme=self.scheme, host=self.host, port=self.port, path="/v1/x")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self.num_open += 1
        try:
            await self.play(Peer(reader, writer))
        except ConnectionError:
            pass  # the client may leave at any time
        except Exception as error:
            self.failures.append(error)
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def serving(play: Play, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Fails in the end if the client has left a connection open, or the script itself has failed."""
    server = Server(play, "https" if tls else "http", host)
    listener = await asyncio.start_server(server.handle, host, 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
        await until(lambda: server.num_open == 0, "every connection ends")
        assert not server.failures
    finally:
        listener.close()
