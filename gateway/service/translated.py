"""Answers of an upstream that speaks only OpenAI's chat, for a client of another API: its bytes become events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from gateway.core.errors import UpstreamError, UpstreamGone
from gateway.core.sse_scan import FrameTooLong, SseScanner
from gateway.core.types import StreamEvent
from gateway.dialects.chat_stream import ChatDecoder, upstream_error
from gateway.service.ending import until_end
from gateway.service.exchange import Exchange
from gateway.service.opening import MAX_ANSWER_BYTES, PassThroughPlan, open_response, read_answer
from gateway.service.passthrough import drain
from gateway.upstreams.base import PassThroughUpstream, RawResponse


async def chat_events(
    exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan
) -> AsyncGenerator[StreamEvent, None]:
    """Events of the answer; there is no `Started`: how long the prompt is, such an upstream says at the end."""
    answered_as = exchange.content_type
    response = await _open(exchange, upstream, plan)
    is_stream, exchange.content_type = exchange.content_type.startswith("text/event-stream"), answered_as
    decoder, chunks = ChatDecoder(exchange.call.request_id), response.chunks()
    is_complete = lambda: decoder.complete and decoder.num_choices >= plan.num_choices  # noqa: E731
    try:
        if is_stream:
            pieces = chunks if exchange.stream else _bounded(chunks)
            async for events in _decoded(until_end(pieces, is_complete), decoder, is_complete):
                for event in events:
                    yield event
            last = decoder.finish()
        else:
            last = decoder.whole(await read_answer(exchange, response))
        exchange.usage = decoder.usage
        for event in last:
            yield event
    finally:
        if decoder.ended:
            await drain(chunks)  # so that the connection can be used again
        await response.close()


async def _open(exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan) -> RawResponse:
    """An error answer is raised in words that any dialect can say."""
    try:
        response = await open_response(exchange, upstream, plan)
    except UpstreamError as error:
        if error.body is None:
            raise
        told = upstream_error(error.body, error.status, error.retry_after)
        told.retry_after_seconds, told.is_final = error.retry_after_seconds, error.is_final
        raise told from None
    return response


async def _bounded(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream that nobody asked for is kept until it is whole, as far as an answer in one piece would be."""
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > MAX_ANSWER_BYTES:
            raise UpstreamGone(f"The upstream's answer is longer than {MAX_ANSWER_BYTES // 1024**2} MiB.")
        yield chunk


async def _decoded(
    chunks: AsyncIterator[bytes], decoder: ChatDecoder, is_complete: Callable[[], bool]
) -> AsyncIterator[list[StreamEvent]]:
    """Events up to the stream's end mark, or its end. Half a frame once all is said costs nothing."""
    scanner = SseScanner()
    try:
        async for chunk in chunks:
            for frame in scanner.feed(chunk):
                yield decoder.frame(frame)
                if decoder.ended:
                    return
        if (rest := scanner.finish()) is not None:
            yield decoder.frame(rest)
    except FrameTooLong as error:
        raise UpstreamGone(f"The upstream's stream can't be read. {error}") from None
    except UpstreamGone:
        if not is_complete():
            raise
