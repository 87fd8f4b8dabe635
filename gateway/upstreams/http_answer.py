"""An answer over HTTP whose headers have arrived: its body as plain bytes, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from gateway.core.errors import UpstreamGone, UpstreamTimeout
from gateway.upstreams.content_coding import ContentDecoder
from gateway.upstreams.http_headers import to_client
from gateway.upstreams.key_blotter import KeyBlotter

_CUT = "The upstream broke the connection before the answer was complete. What came so far is not the whole answer."


class SilenceWatch:
    """Says when a read has waited for too long. One timer for all reads of an answer, not one for each."""

    def __init__(self, max_seconds: float, on_silence: Callable[[], None]) -> None:
        self._max_seconds = max_seconds
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(max_seconds, self._check)
        self.was_silent = False

    def begin(self) -> None:
        self._waiting_since = self._loop.time()

    def end(self) -> None:
        self._waiting_since = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        now = self._loop.time()
        due = self._max_seconds + (now if self._waiting_since is None else self._waiting_since)
        if due > now:
            self._timer = self._loop.call_at(due, self._check)
            return
        self._timer = None
        self.was_silent = True
        self._on_silence()


class HttpResponse:
    """Its body is uncompressed where we know how."""

    def __init__(self, response: aiohttp.ClientResponse, idle_seconds: float, *, key: str = "") -> None:
        self.status = response.status
        headers = to_client(response.headers.items())
        self._decoder = ContentDecoder(headers.get("Content-Encoding", ""))
        if self._decoder.supported:
            headers.pop("Content-Encoding", None)
        self.headers: Mapping[str, str] = CIMultiDict(headers)
        self._response = response
        self._idle_seconds = idle_seconds
        self._blotter = KeyBlotter(key)
        self._watch = SilenceWatch(idle_seconds, response.close)

    async def chunks(self) -> AsyncIterator[bytes]:
        while chunk := await self._read():
            if self._decoder.is_plain:
                if plain := self._blotter.feed(chunk):
                    yield plain
                continue
            for piece in self._decoder.decode(chunk):
                if plain := self._blotter.feed(piece):
                    yield plain
        self._decoder.check_end()
        if rest := self._blotter.rest():
            yield rest

    async def _read(self) -> bytes:
        """The next bytes; empty at the end of the body."""
        self._watch.begin()
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, HttpProcessingError, OSError):
            if not self._watch.was_silent:
                raise UpstreamGone(_CUT) from None
            message = f"The upstream was silent for {self._idle_seconds:g} s within its answer."
            raise UpstreamTimeout(message) from None
        finally:
            self._watch.end()

    async def close(self) -> None:
        self._watch.close()
        if not self._response.closed:
            self._response.close()
