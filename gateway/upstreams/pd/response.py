"""The answers of a pair as the gateway reads them: bytes tidied on their way, the other server cancelled with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from gateway.core.errors import GatewayError, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.sse_scan import DONE, Frame, FrameTooLong, SseScanner
from gateway.core.types import CacheMode, Side
from gateway.upstreams.base import RawResponse, Served
from gateway.upstreams.pd.answer import (
    UNKNOWN,
    PrefillUsage,
    needs_usage,
    prefill_usage,
    tidied,
    tidied_frame,
    told_error,
    told_error_in,
)
from gateway.upstreams.pd.legs import LegFailed, PrefillEnd, read_whole

# Which of the two servers has failed, and whether it may be the other's fault as well.
OnFailure = Callable[[Side, GatewayError, bool], None]
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
        on_failure: Callable[[GatewayError], None],
        on_close: Callable[[bool], None],
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = headers_of(response.headers, mode)
        self.served = served
        self._response = response
        self._on_first = on_first
        self._on_failure = on_failure
        self._on_close = on_close  # told whether the answer was read to its end
        self._is_complete = False

    async def chunks(self) -> AsyncIterator[bytes]:
        is_first = True
        try:
            async for chunk in self._response.chunks():
                if (error := told_error_in(chunk)) is not None:
                    self._on_failure(error)
                elif is_first:
                    self._on_first()
                is_first = False
                self._is_complete = chunk.rstrip().endswith(DONE)
                yield chunk
            self._is_complete = True
        except GatewayError as error:
            self._on_failure(error)
            raise

    async def close(self) -> None:
        try:
            await self._response.close()
        finally:
            self._on_close(self._is_complete)


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
        on_flow: Callable[[], None] = lambda: None,
        on_failure: OnFailure,
        on_close: Callable[[bool, bool], None],
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = headers_of(response.headers, CacheMode.SPLIT)
        self.served = served
        self._response = response
        self._prefill = prefill
        self._handoff_seconds = handoff_seconds
        self._on_first = on_first
        self._on_flow = on_flow  # the second output has come: the first one may say nothing but a role
        self._on_failure = on_failure
        self._on_close = on_close  # told whether the answer was read to its end, and whether both servers' were
        self._is_complete = False
        self._has_output = False
        self._prefill_failed = False
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
                self._look_for_error(body)
                yield tidied(body, await self._usage() if needs_usage(body) else UNKNOWN)
            self._is_complete = True
        except GatewayError as error:
            if not self._prefill_failed:
                self._on_failure("decode", error, self._may_be_shared(error))
            raise

    def _may_be_shared(self, error: GatewayError) -> bool:
        """A server that falls silent amid its output does so by itself; an error that it tells may be a transfer's."""
        return not self._has_output or isinstance(error, UpstreamError)

    def _look_for_error(self, data: bytes) -> None:
        if (error := told_error(data)) is not None:
            self._on_failure("decode", error, True)

    async def _stream(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        scanner = SseScanner()
        chunk = await self._first(source)
        self._has_output = True
        self.served.decode_first_seconds = time.monotonic() - self._asked_at
        told = [self._on_flow, self._on_first]  # not of a chunk that turns out to be a failure
        while chunk is not None:
            out = await self._tidied(_frames(scanner, chunk))
            if told:
                told.pop()()
            if out:
                yield out
            chunk = await anext(source, None)
        if (rest := scanner.finish()) is not None:
            yield await self._tidied([rest])

    async def _tidied(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = []
        for frame in frames:
            if frame.data is not None:
                self._look_for_error(frame.data)
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
                self._raise_refusal()
            async with asyncio.timeout(self._handoff_seconds):
                return await pending
        except TimeoutError:
            message = f"The decode server gave no output within {self._handoff_seconds:g} s after the prefill."
            raise UpstreamTimeout(message) from None
        except LegFailed as failure:
            self._prefill_failed = True
            self._on_failure("prefill", failure.error, True)
            raise failure.error from None
        finally:
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, GatewayError):
                    await pending

    def _raise_refusal(self) -> None:
        end = self._prefill.result()
        if end.is_refusal:
            self._prefill_failed = True
            status = max(400, end.status)
            raise UpstreamError(f"The prefill server answered {end.status}.", status=status, body=end.body)

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
            self._on_close(self._is_complete, both_ended)


def _frames(scanner: SseScanner, chunk: bytes) -> list[Frame]:
    try:
        return scanner.feed(chunk)
    except FrameTooLong as error:
        raise UpstreamGone(f"The upstream's stream can't be passed on. {error}") from None
