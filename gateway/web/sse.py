"""Sends an answer's frames to a client: status held until there is something to say, heartbeats in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web

from gateway.core.errors import GatewayError
from gateway.service import Exchange, headers_of
from gateway.web.errors import facts_of

MAX_SILENT_BEATS = 6  # heartbeats that are left out while nobody has accepted the request: an error may still come


class SseSender:
    """One streamed answer. Frames are whole events, so a heartbeat may come between any two."""

    def __init__(self, request: web.Request, exchange: Exchange, heartbeat_seconds: float) -> None:
        self.response = web.StreamResponse()
        self._request = request
        self._exchange = exchange
        self._heartbeat_seconds = heartbeat_seconds
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._num_silent_beats = 0
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._has_beat_begun = False

    @property
    def prepared(self) -> bool:
        return self._exchange.headers_sent

    async def send(self, frames: AsyncGenerator[bytes, None]) -> None:
        """All frames, to the end. Raises what the frames raise; leaving early closes them, which aborts the work."""
        self._timer = self._loop.call_later(self._heartbeat_seconds, self._on_timer)
        try:
            async with aclosing(frames):
                async for frame in frames:
                    await self._write(frame)
            await self._write(b"")  # the headers, if there was nothing else
        except asyncio.CancelledError:
            if self._beat is not None:
                self._beat.cancel()
            raise
        finally:
            self._timer.cancel()
            await self._end_of_beat()  # what follows depends on whether the headers are out
        await self.response.write_eof()

    async def fail(self, error: GatewayError) -> None:
        """The error inside the stream, whose end never looks like that of a whole answer."""
        renderer = self._exchange.renderer
        if renderer is not None:
            await self.response.write(renderer.error(facts_of(error, self._exchange.call.request_id)))
        await self.response.write_eof()

    async def _prepare(self) -> None:
        exchange, response = self._exchange, self.response
        exchange.status = 200
        response.headers.update(headers_of(exchange))
        response.headers["Content-Type"] = exchange.content_type
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        exchange.headers_sent = True
        await response.prepare(self._request)

    async def _write(self, frame: bytes) -> None:
        if self._beat is not None:
            await self._end_of_beat()
        if not self.prepared:
            await self._prepare()
        if not frame:
            return
        self._writing = True
        await self.response.write(frame)
        self._writing = False
        self._written_at = self._loop.time()

    # A timer looks at the clock now and then; the way of a frame costs no task and no timer of its own.

    def _on_timer(self) -> None:
        now = self._loop.time()
        due = self._written_at + self._heartbeat_seconds
        if due <= now:
            due = now + self._heartbeat_seconds
            if self._may_beat():
                self._has_beat_begun = False
                self._beat = self._loop.create_task(self._write_beat())
        self._timer = self._loop.call_at(max(due, now + 0.01), self._on_timer)

    def _may_beat(self) -> bool:
        """Not while something is being written, nor after the end; a refusal is worth more as an HTTP status.

        As long as the request is not accepted, the headers therefore wait for longer.
        """
        exchange = self._exchange
        if self._writing or (self._beat is not None and not self._beat.done()) or exchange.outcome is not None:
            return False
        if not exchange.content_type.startswith(exchange.call.dialect.stream_type):
            return False  # it is answered in one piece
        if self.prepared:
            return True
        self._num_silent_beats += 1
        return exchange.accepted or self._num_silent_beats >= MAX_SILENT_BEATS

    async def _write_beat(self) -> None:
        self._has_beat_begun = True
        with suppress(ConnectionError):
            if not self.prepared:
                await self._prepare()
            await self.response.write(self._heartbeat())
        self._written_at = self._loop.time()

    def _heartbeat(self) -> bytes:
        renderer = self._exchange.renderer
        return renderer.heartbeat() if renderer is not None else b""

    async def _end_of_beat(self) -> None:
        beat = self._beat
        if beat is None:
            return
        if not self._has_beat_begun:
            beat.cancel()  # what comes instead says more, and may be rendered already
        try:
            await asyncio.wait({beat})
        except asyncio.CancelledError:
            beat.cancel()
            raise
        self._beat = None
