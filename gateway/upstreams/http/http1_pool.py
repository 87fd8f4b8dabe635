"""Requests over HTTP/1.1 to any server that is reached directly, and the connections that wait for the next one."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from gateway.upstreams.http.http1_connection import READ_BYTES, Http1Connection
from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut, ConnectTimedOut
from gateway.upstreams.http.http1_head import request_head
from gateway.upstreams.http.http1_response import Http1Response

_IDLE_SECONDS = 15.0  # less than what servers commonly keep
_CLOSING_SECONDS = 1.0  # who hangs up on a kept connection later than that has been at work on the request
_SECOND_ADDRESS_SECONDS = 0.25  # how long the first address of a name has a lead


class Http1Pool:
    """As many connections as there are requests at once. `tls` is for https; without it, the system's authorities."""

    def __init__(
        self,
        connect_seconds: float,
        *,
        idle_seconds: float = _IDLE_SECONDS,
        closing_seconds: float = _CLOSING_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._closing_seconds = closing_seconds
        self._tls = tls
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._open: set[Http1Connection] = set()
        self._idle: dict[URL, list[Http1Connection]] = {}  # of each origin, the one used last at the end
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        """In use, or waiting for the next request."""
        return len(self._open)

    async def request(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: bytes | None,
        *,
        on_resent: Callable[[], object] | None = None,
    ) -> Http1Response:
        """The answer, once its headers have come; whoever gets it closes it.

        Raises an Http1Error, or ValueError for a header that can't be sent. A request that went over a kept connection
        which the server was just closing has most likely not been seen, and goes over a new one. Whether it was is told
        by how soon it is closed: later, the work may have been done, and whether it is to be done again is the caller's
        to decide. Nothing proves it, so `on_resent` tells the caller that it went out once more.
        """
        head = request_head(method, url, headers, None if body is None else len(body))
        origin = url.origin()
        kept = self._take(origin)
        if kept is not None:
            sent_at = asyncio.get_running_loop().time()
            try:
                return await kept.send(head, body or b"")
            except ConnectionCut as cut:
                if cut.had_begun or asyncio.get_running_loop().time() - sent_at > self._closing_seconds:
                    raise
            if on_resent is not None:
                on_resent()
        return await (await self._connect(origin)).send(head, body or b"")

    async def close(self) -> None:
        """Cuts whatever is still under way."""
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.abort()
        while self._open:  # noqa: ASYNC110 - for the few turns of the loop in which sockets are closed
            await asyncio.sleep(0)

    def _take(self, origin: URL) -> Http1Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    def _keep(self, origin: URL, connection: Http1Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_until = loop.time() + self._idle_seconds
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._idle_seconds, self._sweep)

    def _sweep(self) -> None:
        """Closes what nobody has used for long. Until then a closed one may lie among them."""
        loop = asyncio.get_running_loop()
        kept: dict[URL, list[Http1Connection]] = {}
        for origin, connections in self._idle.items():
            for connection in connections:
                if connection.is_open and connection.idle_until > loop.time():
                    kept.setdefault(origin, []).append(connection)
                elif connection.is_open:
                    connection.abort()
        self._idle = kept
        due = min((of_origin[0].idle_until for of_origin in kept.values()), default=None)
        self._sweeping = None if due is None else loop.call_at(due, self._sweep)

    async def _connect(self, origin: URL) -> Http1Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                connection = await self._open_connection(origin)
        except TimeoutError:
            raise ConnectTimedOut("no connection in time") from None
        if self._is_closed:
            connection.abort()
        return connection

    async def _open_connection(self, origin: URL) -> Http1Connection:
        host = origin.raw_host or ""
        is_tls = origin.scheme == "https"
        try:
            tls = await self._context() if is_tls else None
            addresses = await _addresses(host, origin.port or 0)
            # asyncio's own race for the first address leaves a socket behind when it is cancelled.
            sock = await start_connection(addresses, happy_eyeballs_delay=_SECOND_ADDRESS_SECONDS)
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Http1Connection(self._buffer, partial(self._keep, origin), self._open.discard),
                sock=sock,
                ssl=tls,
                server_hostname=host.rstrip(".") if is_tls else None,
            )
        except OSError as error:
            raise ConnectFailed(error) from None
        if connection.is_open:
            self._open.add(connection)
        return connection

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(_default_context)  # it reads files
        return self._tls


async def _addresses(host: str, port: int) -> Sequence[AddrInfoType]:
    """Asks for a name elsewhere: an answer may take long."""
    kind, protocol = socket.SOCK_STREAM, socket.IPPROTO_TCP
    try:
        return socket.getaddrinfo(host, port, type=kind, proto=protocol, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=kind, proto=protocol)


def _default_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
