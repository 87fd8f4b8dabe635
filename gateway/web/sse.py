"""Sends an answer's frames to a client: status held until there is something to say, heartbeats in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web

from gateway.core.errors import GatewayError
from gateway.service import Exchange
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
        self._written_at = 0.0
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    @property
    def prepared(self) -> bool:
        return self._exchange.headers_sent

    async def send(self, frames: AsyncGenerator[bytes, None]) -> None:
        """All frames, to the end. Raises what the frames raise; leaving early closes them, which aborts the work."""
        try:
            async with aclosing(frames):
                await self._write(await self._first(frames))
                async for frame in frames:
                    await self._write(frame)
        finally:
            self._stop_beating()
        await self.response.write_eof()

    async def fail(self, error: GatewayError) -> None:
        """The error inside the stream, whose end never looks like that of a whole answer."""
        renderer = self._exchange.renderer
        if renderer is not None:
            await self.response.write(renderer.error(facts_of(error, self._exchange.call.request_id)))
        await self.response.write_eof()

    async def _first(self, frames: AsyncGenerator[bytes, None]) -> bytes:
        """The first frame; after some silence the headers go ahead of it.

        As long as the request is not accepted they wait longer: a refusal is worth more to a client as an HTTP status.
        """
        pending = asyncio.ensure_future(anext(frames, b""))
        try:
            for _ in range(MAX_SILENT_BEATS):
                await asyncio.wait({pending}, timeout=self._heartbeat_seconds)
                if pending.done() or self._exchange.accepted:
                    break
            if not pending.done():
                await self._prepare()
                await self._write(self._heartbeat())
            return await pending
        finally:
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, GatewayError):
                    await pending

    async def _prepare(self) -> None:
        exchange, response = self._exchange, self.response
        exchange.status = 200
        response.headers.update(exchange.headers())
        response.headers["Content-Type"] = exchange.content_type
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        exchange.headers_sent = True
        await response.prepare(self._request)
        if exchange.content_type.startswith(exchange.call.dialect.stream_type):
            self._timer = self._loop.call_later(self._heartbeat_seconds, self._on_timer)

    async def _write(self, frame: bytes) -> None:
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
        due = self._written_at + self._heartbeat_seconds
        if due <= self._loop.time() and not self._writing:
            self._beat = self._loop.create_task(self._write_beat())
            due = self._loop.time() + self._heartbeat_seconds
        wait = max(0.01, due - self._loop.time())
        self._timer = self._loop.call_later(wait if not self._writing else self._heartbeat_seconds, self._on_timer)

    async def _write_beat(self) -> None:
        with suppress(ConnectionError):
            await self.response.write(self._heartbeat())
        self._written_at = self._loop.time()

    def _heartbeat(self) -> bytes:
        renderer = self._exchange.renderer
        return renderer.heartbeat() if renderer is not None else b""

    def _stop_beating(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None and not self._beat.done():
            self._beat.cancel()
