"""From whoever answers to the client's bytes: frames of a stream, or one body."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.service.answerers import Answerer, Local, Remote, Translated
from gateway.service.exchange import Exchange
from gateway.service.local import collect_events, stream_events
from gateway.service.output_reader import PlainReader
from gateway.service.passthrough import collect_bytes, stream_bytes
from gateway.service.translated import chat_events


def frames_of(exchange: Exchange, answerer: Answerer) -> AsyncGenerator[bytes, None]:
    """Nothing comes before the first text: until then an error is raised, and nothing was sent."""
    match answerer:
        case Remote(upstream, plan):
            return stream_bytes(exchange, upstream, plan)
        case Translated(upstream, plan, renderer):
            return stream_events(exchange, chat_events(exchange, upstream, plan), renderer, PlainReader())
        case Local(engine, request, renderer, reader):
            return stream_events(exchange, engine.stream(request), renderer, reader)


async def body_of(exchange: Exchange, answerer: Answerer) -> bytes:
    match answerer:
        case Remote(upstream, plan):
            return await collect_bytes(exchange, upstream, plan)
        case Translated(upstream, plan, renderer):
            return await collect_events(exchange, chat_events(exchange, upstream, plan), renderer, PlainReader())
        case Local(engine, request, renderer, reader):
            return await collect_events(exchange, engine.stream(request), renderer, reader)
