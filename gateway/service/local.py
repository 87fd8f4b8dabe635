"""Answers of an upstream that speaks events, rendered into a dialect and timed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import assert_never

import msgspec

from gateway.core.errors import UpstreamGone
from gateway.core.types import Finished, FinishReason, Started, StreamEvent, TextDelta
from gateway.service.call import Renderer
from gateway.service.exchange import Exchange

DONE_FRAME = b"data: [DONE]\n\n"


async def stream_events(
    exchange: Exchange, events: AsyncGenerator[StreamEvent, None], renderer: Renderer
) -> AsyncGenerator[bytes, None]:
    """Frames of the answer. The first comes with the first text, so that until then an error is a plain HTTP error."""
    opening = renderer.start()
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    exchange.note(event.notices)
                case TextDelta(text, num_tokens):
                    exchange.clock.tokens(num_tokens, has_text=bool(text))
                    if text:
                        yield opening + renderer.text(text)
                        opening = b""
                case Finished():
                    reason = _accept(exchange, event)
                    frames = renderer.finish(reason, event.usage)
                    yield opening + frames + timing_comment(exchange) + DONE_FRAME
                    return
                case _:
                    assert_never(event)
    raise UpstreamGone("The engine ended the answer without finishing it. Try again.")


async def collect_events(exchange: Exchange, events: AsyncGenerator[StreamEvent, None], renderer: Renderer) -> bytes:
    """The answer as one object."""
    texts: list[str] = []
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    exchange.note(event.notices)
                case TextDelta(text, num_tokens):
                    exchange.clock.tokens(num_tokens, has_text=bool(text))
                    texts.append(text)
                case Finished():
                    return renderer.whole("".join(texts), _accept(exchange, event), event.usage)
                case _:
                    assert_never(event)
    raise UpstreamGone("The engine ended the answer without finishing it. Try again.")


def _accept(exchange: Exchange, event: Finished) -> FinishReason:
    """An aborted generation never looks like a finished one."""
    exchange.usage, exchange.timings = event.usage, event.timings
    if event.reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise UpstreamGone(f"The engine gave up on the answer ({event.reason.value}). Try again.")
    exchange.finish(event.reason, event.usage, event.timings)
    return event.reason


def timing_comment(exchange: Exchange) -> bytes:
    """A line that every SSE parser skips; the same is at GET /v1/requests/{id}."""
    facts = {"request_id": exchange.call.request_id, "cache_mode": exchange.served_mode}
    return b": kvgate " + msgspec.json.encode(facts | exchange.timing_facts()) + b"\n\n"
