"""Answers of an upstream that speaks the client's own API: bytes go on as they are, and are read along the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from gateway.core.errors import GatewayError, UpstreamError, UpstreamGone
from gateway.core.spelling import parse_mode
from gateway.core.sse_scan import Frame, FrameTooLong, SseScanner
from gateway.dialects.sniff import Seen, sniff, sniff_whole
from gateway.service.exchange import Exchange, Outcome
from gateway.service.local import DONE_FRAME, timing_comment
from gateway.upstreams.base import PassThroughUpstream, RawRequest, RawResponse

_DRAIN_SECONDS = 1.0  # wait for the end of a body whose answer is complete, so that its connection can be used again
_CUT = "The upstream broke the connection before the answer was complete. What came so far is not the whole answer."


@dataclass(frozen=True, slots=True)
class PassThroughPlan:
    """A request ready to be sent, and what to do without if the upstream refuses our addition."""

    request: RawRequest
    without_usage: RawRequest | None = None  # the same without the usage we asked for on our own account
    strip_usage: bool = False  # the client didn't ask for usage


async def open_response(exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan) -> RawResponse:
    """The upstream's answer once its headers are there; an error answer is raised."""
    response = await upstream.open(plan.request)
    if response.status in (400, 422) and plan.without_usage is not None:
        body = await _read_error(response)
        if b"stream_options" not in body and b"include_usage" not in body:
            raise upstream_error(response, body)
        exchange.note(("the upstream doesn't know stream_options: token counts are not known",))
        response = await upstream.open(plan.without_usage)
    exchange.upstream_headers = dict(response.headers)
    exchange.served_mode = _confirmed_mode(exchange.upstream_headers.pop("X-Cache-Mode", ""))
    content_type = exchange.upstream_headers.pop("Content-Type", "application/json")
    if 300 <= response.status < 400:
        await response.close()
        raise UpstreamError(_redirected(response.status), status=502)
    if response.status >= 400:
        exchange.upstream_headers.pop("Content-Encoding", None)  # the error's body is ours or was understood
        raise upstream_error(response, await _read_error(response))
    exchange.content_type = content_type
    return response


def _confirmed_mode(said: str) -> str:
    """Only a mode that the upstream names itself; whatever else it writes never becomes a label."""
    try:
        return parse_mode(said).value
    except ValueError:
        return "unknown"


async def _read_error(response: RawResponse) -> bytes:
    chunks: list[bytes] = []
    try:
        with suppress(GatewayError):  # half an error is still the error
            async for chunk in response.chunks():
                chunks.append(chunk)
                if sum(map(len, chunks)) > 1024 * 1024:
                    break
    finally:
        await response.close()
    return b"".join(chunks)


def upstream_error(response: RawResponse, body: bytes) -> UpstreamError:
    """The upstream's own error; a body that isn't JSON of the API's shape is wrapped later, not parsed."""
    retry_after = response.headers.get("Retry-After")
    is_json = body.lstrip()[:1] == b"{" and sniff_whole(body).error
    text = "" if is_json else _plain(response, body)
    message = f"The upstream answered {response.status}{text}."
    status = response.status if response.status <= 599 else 502
    return UpstreamError(message, status=status, body=body if is_json else None, retry_after=retry_after)


def _redirected(status: int) -> str:
    return (
        f"The upstream answered {status}, a redirect, which is not followed: its key would go along. "
        "Set the base URL to the address that it leads to."
    )


def _plain(response: RawResponse, body: bytes) -> str:
    if "html" in response.headers.get("Content-Type", "") or body.lstrip()[:1] == b"<":
        return " with an HTML page; check that the base URL is that of an API"
    text = " ".join(body[:500].decode("utf-8", "replace").split())
    return f": {text}" if text else " without a body"


async def collect_bytes(exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan) -> bytes:
    """The answer of a request that didn't ask for a stream, untouched."""
    response = await open_response(exchange, upstream, plan)
    try:
        body = b"".join([chunk async for chunk in response.chunks()])
    finally:
        await response.close()
    _accept_whole(exchange, body)
    return body


def _accept_whole(exchange: Exchange, body: bytes) -> None:
    if body.lstrip()[:1] != b"{":
        what = "an HTML page" if body.lstrip()[:1] == b"<" else "something that is no JSON object"
        raise UpstreamError(f"The upstream answered 200 with {what}; is its base URL that of an API?", status=502)
    if _is_cut(body):
        raise UpstreamGone(_CUT)
    seen = sniff_whole(body)
    if seen.error:
        raise UpstreamError("The upstream answered with an error.", status=seen.error_code or 502, body=body)
    if seen.text:
        exchange.clock.text_chunk()
    exchange.finish(seen.finish_reason or "", seen.usage, None)


def _is_cut(body: bytes) -> bool:
    """Whether a JSON object ends too early. Without a length, only the body itself says so."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)  # other faults are the client's to judge: it may be laxer than we are
    except RecursionError:
        pass
    return False


async def stream_bytes(
    exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan
) -> AsyncGenerator[bytes, None]:
    """Frames of the answer. Nothing goes out before the first text: until then an error is an HTTP error."""
    response = await open_response(exchange, upstream, plan)
    try:
        if not exchange.content_type.startswith("text/event-stream"):
            yield await _whole_instead_of_stream(exchange, response)
            return
        relay = _Relay(exchange, plan.strip_usage)
        chunks = response.chunks()
        async for chunk in _until_cut(chunks, relay):
            out = relay.take(chunk)
            if out:
                yield out
            if relay.unreadable_error is not None:
                raise relay.unreadable_error
            if relay.ended:
                break
        else:
            yield relay.finish()
        if relay.done:
            await _drain(chunks)
    finally:
        await response.close()


async def _whole_instead_of_stream(exchange: Exchange, response: RawResponse) -> bytes:
    body = b"".join([chunk async for chunk in response.chunks()])
    if exchange.headers_sent:
        raise UpstreamGone("The upstream answered without a stream, after the stream to the client had begun.")
    _accept_whole(exchange, body)
    exchange.note(("the upstream answered without a stream",))
    return body


async def _until_cut(chunks: AsyncIterator[bytes], relay: _Relay) -> AsyncIterator[bytes]:
    """The chunks; a connection that breaks once the answer is complete is its end."""
    try:
        async for chunk in chunks:
            yield chunk
    except UpstreamGone:
        if not relay.complete:
            raise


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError, GatewayError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in chunks:
                pass


class _Relay:
    """Passes frames on and keeps what they say. `[DONE]` goes out only after a finish reason or itself."""

    def __init__(self, exchange: Exchange, strip_usage: bool) -> None:
        self.ended = False
        self.done = False
        self.unreadable_error: UpstreamError | None = None  # to be told in our own words
        self._exchange = exchange
        self._strip_usage = strip_usage
        self._scanner = SseScanner()
        self._held: list[bytes] = []  # until the first text
        self._flowing = False
        self._finish_reason: str | None = None

    def take(self, chunk: bytes) -> bytes:
        try:
            frames = self._scanner.feed(chunk)
        except FrameTooLong as error:
            raise UpstreamGone(f"The upstream's stream can't be passed on. {error}") from None
        return self._pass_on(frames)

    def finish(self) -> bytes:
        """The upstream closed the stream in good order. Without a finish reason that is a cut answer."""
        last = self._scanner.finish()
        out = self._pass_on([last] if last is not None else [])
        if self.ended:
            return out
        if self._finish_reason is None:
            raise UpstreamGone(_CUT)
        self._accept()
        return out + timing_comment(self._exchange) + DONE_FRAME

    @property
    def complete(self) -> bool:
        """Whether the model had said that it is done: what breaks after that costs nothing."""
        return self._finish_reason is not None

    def _pass_on(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = self._held if not self._flowing else []
        for frame in frames:
            if self.ended:
                break
            seen = sniff(frame)
            self._learn(seen)
            if seen.error:
                self._fail(frame, seen)
                if self.unreadable_error is not None:
                    break
            elif seen.done:
                self._check_answered()
                self.done = self.ended = True
                self._accept()
                out.append(timing_comment(self._exchange))
            if not (seen.usage_only and self._strip_usage):
                out.append(frame.raw)
            self._flowing = self._flowing or seen.text or seen.finish_reason is not None or self.ended
        if not self._flowing:
            return b""
        self._held = []
        return b"".join(out)

    def _learn(self, seen: Seen) -> None:
        if seen.text:
            self._exchange.clock.text_chunk()
        if seen.usage is not None:
            self._exchange.usage = seen.usage
        if seen.finish_reason is not None:
            self._finish_reason = seen.finish_reason

    def _fail(self, frame: Frame, seen: Seen) -> None:
        """Before the first byte an error frame is an HTTP error; after it the frame itself tells the client."""
        data = frame.data if frame.data is not None and frame.data.lstrip()[:1] == b"{" else None
        error = UpstreamError("The upstream ended its stream with an error.", status=seen.error_code or 502, body=data)
        if not self._flowing and not self._exchange.headers_sent:
            raise error
        self._exchange.fail(error)
        self.ended = True
        self.unreadable_error = error if data is None else None

    def _check_answered(self) -> None:
        """`[DONE]` after nothing at all is no answer: clients would take it for an empty one."""
        if not self._flowing and self._finish_reason is None:
            raise UpstreamGone("The upstream ended its stream without an answer.")

    def _accept(self) -> None:
        if self._exchange.outcome is Outcome.OK or self._exchange.error is not None:
            return
        self._exchange.finish(self._finish_reason or "", self._exchange.usage, None)
