"""One connection to an upstream that speaks HTTP/1.1: one request at a time, and each answer as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from typing_extensions import override

from gateway.upstreams.http.http1_errors import ConnectionCut
from gateway.upstreams.http.http1_response import MAX_HELD, Http1Response

READ_BYTES = 64 * 1024
_PIECE = 256 * 1024  # of a request, that is written at once


class Http1Connection(asyncio.BufferedProtocol):
    """`on_free` is called when an answer is complete and another request may follow, `on_lost` at the very end.

    `buffer` takes what is read, and may be that of all connections of a loop: nothing stays in it from one read to the
    next. (Without one, asyncio makes room for 256 KiB each time, which costs more than all the rest of a read.)
    """

    def __init__(
        self,
        buffer: memoryview,
        on_free: Callable[[Http1Connection], None],
        on_lost: Callable[[Http1Connection], None],
    ) -> None:
        self._buffer = buffer
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._response: Http1Response | None = None  # the one that is arriving
        self._is_sending = False
        self._is_full = False  # the transport wants no more for now
        self._is_paused = False  # we want no more for now
        self.is_open = False
        self.idle_until = 0.0  # kept for whoever keeps it

    async def send(self, head: bytes, body: bytes) -> Http1Response:
        """The answer, once its headers have come. Raises ConnectionCut or InvalidHttp.

        Whoever gives up waiting has closed the connection.
        """
        if not self.is_open:
            raise ConnectionCut(had_begun=False)
        response = self._response = Http1Response(self)
        self._is_sending = True
        try:
            await self._write(head, body, response)
            await response.head()
        except BaseException:
            self.abort()
            raise
        return response

    async def _write(self, head: bytes, body: bytes, response: Http1Response) -> None:
        """Not to the end if the upstream refuses the request before."""
        if len(body) <= _PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            for at in range(0, len(body), _PIECE):
                if not await self._may_write(response):
                    return
                self._transport.write(memoryview(body)[at : at + _PIECE])
        self._is_sending = False

    async def _may_write(self, response: Http1Response) -> bool:
        """Waits until the transport takes more; False if there is no use in it any longer."""
        # An early answer is to be read before writing to one who has hung up after it fails, for that loses the answer.
        for _ in range(2):  # our turn comes before that of what the loop has just seen
            await asyncio.sleep(0)
        while self._is_full and not response.has_ended and not response.is_refusal:
            await response.change()
        return not response.has_ended and not response.is_refusal

    def abort(self) -> None:
        """At once; what isn't sent yet never is."""
        self.is_open = False
        self._transport.abort()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    @override
    def buffer_updated(self, nbytes: int) -> None:
        response = self._response
        if response is None:
            self.abort()  # nobody has asked for anything
            return
        response.feed(self._buffer[:nbytes])
        if response.has_ended:
            self._finish(response)
        elif response.num_held > MAX_HELD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _finish(self, response: Http1Response) -> None:
        self._response = None
        is_sent = not self._is_sending and self._transport.get_write_buffer_size() == 0
        if response.can_keep_alive and is_sent and self.is_open:
            self.resume_reading()
            self._on_free(self)
        else:
            self.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        was_aborted, self.is_open = not self.is_open, False
        if self._response is not None:
            self._response.on_end(exc or (ConnectionAbortedError() if was_aborted else None))
            self._response = None
        self._on_lost(self)

    @override
    def pause_writing(self) -> None:
        self._is_full = True

    @override
    def resume_writing(self) -> None:
        self._is_full = False
        if self._response is not None:
            self._response.wake()
