"""An answer in HTTP/1.1 as it arrives: bytes of the connection in, head and body out. No I/O.

The body has no end but the one that the head announces: a length, a last chunk, or, only where it says neither, the
end of the connection. Strict: what two readers could understand in two ways is no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.upstreams.http.http1_errors import ConnectionCut, Http1Error, InvalidHttp

MAX_HELD = 256 * 1024  # bytes that wait for the reader; the connection stops reading above it
_MAX_HEADER = 32 * 1024
_MAX_HEADERS = 256
_MAX_FRAMING = 128 * 1024  # bytes in a row that are no body: heads, sizes and extensions of chunks, trailers
_SWITCHING_PROTOCOLS = 101


class Carrier(Protocol):
    """The connection, as its answer sees it."""

    def abort(self) -> None: ...

    def resume_reading(self) -> None: ...


class Http1Response:
    """The answer to one request. `feed` and `on_end` are the connection's; one reader reads."""

    def __init__(self, connection: Carrier) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.has_head = False
        self.is_complete = False
        self.has_ended = False  # it is complete, or nothing more can come
        self.can_keep_alive = False  # the connection is good for another request
        self.num_held = 0
        self.on_body: Callable[[bytes], None]  # called by the parser; a list's method, so no Python code runs for it
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._connection = connection
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._num_framing = 0
        self._has_begun = False
        self._has_length = False
        self._is_chunked = False
        self._error: Http1Error | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------------------------------------ for the reader

    async def head(self) -> None:
        """Wait until the status and the headers are there. Raises ConnectionCut or InvalidHttp."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self.change()

    async def read(self) -> bytes:
        """All of the body that is there, as soon as there is any; empty at its end. Raises as `head` does."""
        pieces = self._pieces
        while not pieces:
            if self.is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self.change()
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if self.num_held > MAX_HELD and not self.has_ended:  # else it may be another's by now
            self._connection.resume_reading()
        self.num_held = 0
        return data

    async def change(self) -> None:
        """Wait until more has come, or `wake` is called."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """If the answer isn't complete, nobody wants the rest: the connection goes."""
        if not self.has_ended:
            self._end(ConnectionCut(had_begun=True))
            self.wake()
            self._connection.abort()

    # -------------------------------------------------------------------------------------------- for the connection

    @property
    def is_refusal(self) -> bool:
        """Whoever says so has no use for the rest of the request."""
        return self.has_head and self.status >= 300

    def feed(self, data: bytes | memoryview) -> None:
        """Keeps nothing of `data` itself. Whatever is wrong with it is told to the reader, after what was right."""
        if self._parser is None:
            return
        num_pieces = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.can_keep_alive = False
            if not self.is_complete:  # more than one answer is no fault of the first
                self._end(InvalidHttp("not a valid answer"))
        self.num_held += len(data)
        if self.is_complete:
            self._end()
        elif len(self._pieces) > num_pieces:
            self._num_framing = 0
        else:
            self._num_framing += len(data)
            if self._num_framing > _MAX_FRAMING:
                self._end(InvalidHttp("more around the body than there ever is"))
        self.wake()

    def on_end(self, error: Exception | None) -> None:
        """The connection has ended, in good order if there is no error."""
        if self.has_ended:
            return
        self.is_complete = error is None and self.has_head and not (self._has_length or self._is_chunked)
        self._end(None if self.is_complete else ConnectionCut(had_begun=self._has_begun))
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, error: Http1Error | None = None) -> None:
        self.has_ended = True
        self._error = self._error or error
        self._parser = None  # the two hold each other

    # ------------------------------------------------------------------------------------------------ for the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise InvalidHttp("a second answer to one request")
        self._has_begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > _MAX_HEADER or len(self.headers) >= _MAX_HEADERS:
            raise InvalidHttp("too large a header, or too many")
        if self.has_head:
            return  # of the trailer
        text = value.decode("utf-8", "surrogateescape").rstrip(" \t")
        lower = name.lower()
        if lower == b"content-length":
            self._has_length = True
        elif lower == b"transfer-encoding":
            if self._is_chunked or text.lower() != "chunked":
                raise InvalidHttp("a transfer coding besides chunked")
            self._is_chunked = True
        self.headers.append((name.decode(), text))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status == _SWITCHING_PROTOCOLS:
            raise InvalidHttp("a switch of protocols that nobody asked for")
        self.has_head = self.status >= 200

    def on_message_complete(self) -> None:
        if not self.has_head:
            self._forget_interim()
            return
        assert self._parser is not None
        self.can_keep_alive = self._parser.should_keep_alive()
        self.is_complete = True

    def _forget_interim(self) -> None:
        """An answer such as `100 Continue` comes before the real one."""
        if self._pieces:
            raise InvalidHttp("an interim answer with a body")
        self.headers.clear()
        self._has_length = self._is_chunked = False
