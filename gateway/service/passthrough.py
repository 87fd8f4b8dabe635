"""Answers of an upstream that speaks the client's own API: bytes go on as they are, and are read along the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress

import msgspec

from gateway.core.errors import CUT, GatewayError, UpstreamError, UpstreamGone
from gateway.core.sse_scan import MAX_FRAME_BYTES, Frame, FrameTooLong, SseScanner
from gateway.dialects import sniff, sniff_anthropic, sniff_responses
from gateway.dialects.sniff import Seen, Sniffer
from gateway.service.ending import until_end
from gateway.service.exchange import Exchange, Outcome
from gateway.service.local import timing_comment
from gateway.service.opening import PassThroughPlan, open_response, read_answer, refuse_stream
from gateway.upstreams.base import PassThroughUpstream, RawResponse

_DRAIN_SECONDS = 0.1  # wait for the end of a body whose answer is complete, so that its connection can be used again


SNIFFERS: dict[str, Callable[[], Sniffer]] = {
    "openai_chat": lambda: sniff.OPENAI,
    "openai_completions": lambda: sniff.OPENAI,
    "openai_responses": lambda: sniff_responses.RESPONSES,
    "anthropic_messages": sniff_anthropic.sniffer,
}


def _sniffer(exchange: Exchange) -> Sniffer:
    return SNIFFERS[exchange.call.dialect.name]()


async def collect_bytes(exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan) -> bytes:
    """The answer of a request that didn't ask for a stream, untouched."""
    response = await open_response(exchange, upstream, plan)
    await refuse_stream(response, exchange.content_type)
    try:
        body = await read_answer(exchange, response)
    finally:
        await response.close()
    _accept_whole(exchange, body)
    return body


def _accept_whole(exchange: Exchange, body: bytes) -> None:
    if body.lstrip()[:1] != b"{":
        exchange.begun = False  # it is no answer at all
        what = "an HTML page" if body.lstrip()[:1] == b"<" else "something that is no JSON object"
        message = f"The upstream answered 200 with {what}; is its base URL that of an API?"
        raise UpstreamError(message, status=502, is_final=True)
    if _is_cut(body):
        raise UpstreamGone(CUT)
    seen = _sniffer(exchange).whole(body)
    if seen.error:
        exchange.begun = False
        status, told = seen.error_code or 502, seen.error_body
        raise UpstreamError("The upstream answered with an error.", status=status, body=told, is_final=True)
    if seen.text:
        exchange.clock.text_chunk()
    exchange.finish(seen.finish_reason or "", seen.usage, None)
    exchange.check_prompt()


def _is_cut(body: bytes) -> bool:
    """Whether a JSON object ends too early. Without a length, only the body itself says so."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)  # other faults are the client's to judge: it may be laxer than we are
    except RecursionError:
        return not body.rstrip().endswith(b"}")
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
        async for chunk in until_end(chunks, lambda: relay.complete):
            for out in relay.take(chunk):
                if out:
                    yield out
            if relay.unreadable_error is not None:
                raise relay.unreadable_error
            if relay.ended:
                break
        else:
            yield relay.finish()
        if relay.done:
            await drain(chunks)
    finally:
        await response.close()


async def _whole_instead_of_stream(exchange: Exchange, response: RawResponse) -> bytes:
    body = await read_answer(exchange, response)
    if exchange.headers_sent:
        raise UpstreamGone("The upstream answered without a stream, after the stream to the client had begun.")
    _accept_whole(exchange, body)
    exchange.note(("the upstream answered without a stream",))
    return body


async def drain(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError, GatewayError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in chunks:
                pass


def _num_choices(exchange: Exchange) -> int:
    """As many as the request asks for; an upstream may begin one after the other has ended."""
    asked = exchange.call.body.value("n")
    return asked if isinstance(asked, int) and 1 <= asked <= sniff.MAX_CHOICES else 1


class _Relay:
    """Passes frames on and keeps what they say. The end mark goes out only after a finish reason or itself."""

    def __init__(self, exchange: Exchange, strip_usage: bool) -> None:
        self.ended = False
        self.done = False
        self.unreadable_error: UpstreamError | None = None  # to be told in our own words
        self._exchange = exchange
        self._strip_usage = strip_usage
        self._scanner = SseScanner()
        self._sniffer = _sniffer(exchange)
        self._num_held_bytes = 0
        self._held = bytearray()  # until the first text
        self._flowing = False
        self._finish_reason: str | None = None
        self._choices = set(range(_num_choices(exchange)))
        self._ended_choices: set[int] = set()

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """What goes out. The first text doesn't wait until what came with it is read too."""
        try:
            frames = self._scanner.feed(chunk)
        except FrameTooLong as error:
            raise UpstreamGone(f"The upstream's stream can't be passed on. {error}") from None
        num_read = 0
        while not self._flowing and num_read < len(frames):
            yield self._pass_on(frames[num_read : num_read + 1])
            num_read += 1
        yield self._pass_on(frames[num_read:])

    def finish(self) -> bytes:
        """The upstream closed the stream in good order. Without a finish reason that is a cut answer."""
        last = self._scanner.finish()
        out = self._pass_on([last] if last is not None else [])
        if self.ended:
            return out
        if not self.complete:
            raise UpstreamGone(CUT)
        self._accept()
        return out + timing_comment(self._exchange) + self._sniffer.closing

    @property
    def complete(self) -> bool:
        """Whether every choice has said why it ended: what breaks after that costs nothing."""
        return self._finish_reason is not None and self._choices <= self._ended_choices

    def _pass_on(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = []
        sniff_frame, text_chunk = self._sniffer.frame, self._exchange.clock.text_chunk
        for frame in frames:
            if self.ended:
                break
            seen = sniff_frame(frame)
            if seen is sniff.TEXT:  # nearly all of them
                text_chunk()
                self._flowing = True
                out.append(frame.raw)
            elif self._take_in(seen, out) and not (seen.usage_only and self._strip_usage):
                out.append(frame.raw)
        if not self._flowing:
            self._held += b"".join(out)
            self._check_held(frames)
            return b""
        if self._held:
            out.insert(0, bytes(self._held))
            self._held.clear()
        return b"".join(out)

    def _take_in(self, seen: Seen, out: list[bytes]) -> bool:
        """What a frame says, and what goes out ahead of it. False if it can't be passed on."""
        self._learn(seen)
        if seen.error:
            self._fail(seen)
        elif seen.done:
            self._check_answered()
            self.done = self.ended = True
            self._accept()
            out.append(timing_comment(self._exchange))
        self._flowing = self._flowing or seen.text or seen.finish_reason is not None or self.ended
        return self.unreadable_error is None

    def _check_held(self, frames: list[Frame]) -> None:
        self._num_held_bytes += sum(len(frame.raw) for frame in frames)
        if self._num_held_bytes > MAX_FRAME_BYTES:
            raise UpstreamGone("The upstream's stream can't be passed on: it has sent too much before any text.")

    def _learn(self, seen: Seen) -> None:
        if seen.text:
            self._exchange.clock.text_chunk()
        if seen.usage is not None:
            self._exchange.usage = seen.usage
        self._choices.update(seen.choices)
        if seen.finish_reason is not None:
            self._finish_reason = seen.finish_reason
            self._ended_choices.update(seen.ended)

    def _fail(self, seen: Seen) -> None:
        """Before the first byte an error frame is an HTTP error; after it the frame itself tells the client."""
        status, body = seen.error_code or 502, seen.error_body
        message = "The upstream ended its stream with an error."
        error = UpstreamError(message, status=status, body=body, is_final=True)
        if not self._flowing and not self._exchange.headers_sent:
            raise error
        self._exchange.fail(error)
        self.ended = True
        self.unreadable_error = error if body is None else None

    def _check_answered(self) -> None:
        """`[DONE]` after nothing at all is no answer: clients would take it for an empty one."""
        if not self._flowing and self._finish_reason is None:
            raise UpstreamGone("The upstream ended its stream without an answer.")

    def _accept(self) -> None:
        if self._exchange.outcome is Outcome.OK or self._exchange.error is not None:
            return
        self._exchange.finish(self._finish_reason or "", self._exchange.usage, None)
        self._exchange.check_prompt()
