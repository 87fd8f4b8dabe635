"""The answers of a pair as the gateway reads them: bytes tidied on their way, the other server cancelled with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from gateway.core.errors import GatewayError, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.sse_scan import DONE, Frame, FrameTooLong, SseScanner
from gateway.core.types import CacheMode
from gateway.upstreams.base import RawResponse, Served
from gateway.upstreams.pd.answer import UNKNOWN, PrefillUsage, needs_usage, prefill_usage, tidied, tidied_frame
from gateway.upstreams.pd.legs import LegFailed, PrefillEnd, read_whole
from gateway.upstreams.pd.servers import Side

_USAGE_SECONDS = 1.0  # wait for a prefill's usage when the decode side is done already


def headers_of(response: Mapping[str, str], mode: CacheMode) -> dict[str, str]:
    """The answer's own headers; the mode is ours to say."""
    kept = {name: value for name, value in response.items() if name.lower() != "x-cache-mode"}
    return {**kept, "X-Cache-Mode": mode.value}


class WholeAnswer:
    """An answer that is here already: a prefill server's refusal, or a prefill that was all."""

    def __init__(self, *, status: int, headers: Mapping[str, str], body: bytes, served: Served) -> None:
        self.status = status
        self.headers: Mapping[str, str] = headers_of(headers, CacheMode.SPLIT)
        self.served = served
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def close(self) -> None:
        """Nothing is open."""


class PlainAnswer:
    """One server's answer as it comes."""

    def __init__(
        self,
        response: RawResponse,
        served: Served,
        mode: CacheMode,
        *,
        on_first: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = headers_of(response.headers, mode)
        self.served = served
        self._response = response
        self._on_first = on_first
        self._on_close = on_close

    async def chunks(self) -> AsyncIterator[bytes]:
        is_first = True
        async for chunk in self._response.chunks():
            if is_first:
                is_first = False
                self._on_first()
            yield chunk

    async def close(self) -> None:
        try:
            await self._response.close()
        finally:
            self._on_close()


class SplitAnswer:
    """A decode server's answer, with the prefill that may go on beside it."""

    def __init__(
        self,
        response: RawResponse,
        prefill: asyncio.Future[PrefillEnd],
        served: Served,
        *,
        handoff_seconds: float,
        asked_at: float,
        on_first: Callable[[], None],
        on_failure: Callable[[Side], None],
        on_close: Callable[[bool], None],
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = headers_of(response.headers, CacheMode.SPLIT)
        self.served = served
        self._response = response
        self._prefill = prefill
        self._handoff_seconds = handoff_seconds
        self._on_first = on_first
        self._on_failure = on_failure
        self._on_close = on_close  # told whether both servers' answers were read to their end
        self._is_complete = False
        self._asked_at = asked_at
        self._waited_for_usage = False

    async def chunks(self) -> AsyncIterator[bytes]:
        source = self._response.chunks()
        try:
            if self.status >= 300:
                async for chunk in source:
                    yield chunk
            elif "text/event-stream" in self.headers.get("Content-Type", ""):
                async for chunk in self._stream(source):
                    yield chunk
            else:
                body = await read_whole(source)
                yield tidied(body, await self._usage() if needs_usage(body) else UNKNOWN)
            self._is_complete = True
        except GatewayError:
            self._on_failure("decode")
            raise

    async def _stream(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        scanner = SseScanner()
        chunk = await self._first(source)
        self._on_first()
        self.served.decode_first_seconds = time.monotonic() - self._asked_at
        while chunk is not None:
            if out := await self._tidied(_frames(scanner, chunk)):
                yield out
            chunk = await anext(source, None)
        if (rest := scanner.finish()) is not None:
            yield await self._tidied([rest])

    async def _tidied(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = []
        for frame in frames:
            wants_usage = frame.data is not None and needs_usage(frame.data)
            out.append(tidied_frame(frame, await self._usage() if wants_usage else UNKNOWN))
            self._is_complete = self._is_complete or (frame.data is not None and frame.data.strip() == DONE)
        return b"".join(out)

    async def _first(self, source: AsyncIterator[bytes]) -> bytes | None:
        """The first bytes. Until then a prefill's failure is the answer's: the decode server would wait in vain."""
        pending = asyncio.ensure_future(anext(source, None))
        either: set[asyncio.Future[Any]] = {pending, self._prefill}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                _raise_refusal(self._prefill)
            async with asyncio.timeout(self._handoff_seconds):
                return await pending
        except TimeoutError:
            message = f"The decode server gave no output within {self._handoff_seconds:g} s after the prefill."
            raise UpstreamTimeout(message) from None
        except LegFailed as failure:
            self._on_failure("prefill")
            raise failure.error from None
        finally:
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, GatewayError):
                    await pending

    async def _usage(self) -> PrefillUsage:
        """What the prefill server said; unknown if it has failed by now, or isn't done long after the other side.

        It is waited for only once: a server may count with every token.
        """
        if not self._waited_for_usage:
            self._waited_for_usage = True
            await asyncio.wait({self._prefill}, timeout=_USAGE_SECONDS)
        if not self._prefill.done() or self._prefill.cancelled() or self._prefill.exception() is not None:
            return UNKNOWN
        return prefill_usage(self._prefill.result().body)

    async def close(self) -> None:
        both_ended = self._is_complete and self._prefill.done()
        try:
            await self._response.close()
            if not self._prefill.done():
                self._prefill.cancel()
            with suppress(asyncio.CancelledError, LegFailed):
                await self._prefill
        finally:
            self._on_close(both_ended)


def _frames(scanner: SseScanner, chunk: bytes) -> list[Frame]:
    try:
        return scanner.feed(chunk)
    except FrameTooLong as error:
        raise UpstreamGone(f"The upstream's stream can't be passed on. {error}") from None


def _raise_refusal(prefill: asyncio.Future[PrefillEnd]) -> None:
    end = prefill.result()
    if end.is_refusal:
        raise UpstreamError(f"The prefill server answered {end.status}.", status=max(400, end.status), body=end.body)
