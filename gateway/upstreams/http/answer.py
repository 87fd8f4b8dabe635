"""An answer over HTTP whose headers have arrived: its body as plain bytes, and what can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Protocol

from multidict import CIMultiDict

from gateway.core.errors import CUT, UpstreamGone, UpstreamTimeout
from gateway.upstreams.http.content_coding import ContentDecoder
from gateway.upstreams.http.headers import to_client
from gateway.upstreams.http.http1_errors import Http1Error
from gateway.upstreams.http.key_blotter import KeyBlotter


class HttpAnswer(Protocol):
    """What an HTTP client gives once the headers of an answer have come."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Iterable[tuple[str, str]]: ...

    async def read(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises an Http1Error if the connection breaks before."""

    def close(self) -> None:
        """Cuts the connection if the body isn't complete."""


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

    def __init__(self, answer: HttpAnswer, idle_seconds: float, *, key: str = "") -> None:
        self.status = answer.status
        headers = to_client(answer.headers)
        self._decoder = ContentDecoder(headers.get("Content-Encoding", ""))
        if self._decoder.supported:
            headers.pop("Content-Encoding", None)
        self._answer = answer
        self._idle_seconds = idle_seconds
        self._blotter = KeyBlotter(key)
        self.headers: Mapping[str, str] = CIMultiDict(
            {name: self._blotter.text(value) for name, value in headers.items()}
        )
        self._watch = SilenceWatch(idle_seconds, answer.close)

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
            return await self._answer.read()
        except Http1Error:
            if not self._watch.was_silent:
                raise UpstreamGone(CUT) from None
            message = f"The upstream was silent for {self._idle_seconds:g} s within its answer."
            raise UpstreamTimeout(message) from None
        finally:
            self._watch.end()

    async def close(self) -> None:
        self._watch.close()
        self._answer.close()
