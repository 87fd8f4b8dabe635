"""Who answers a call, and what is asked of it: the local engine, or an upstream of whichever API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from backends.protocol.messages import ChatPrompt
from gateway.core.types import CacheStrategy, ChatRequest, ModelCard, Route
from gateway.dialects.base import AnswerContext, Renderer
from gateway.dialects.sampling import Defaults, ParsedBody
from gateway.service.exchange import Exchange
from gateway.service.opening import PassThroughPlan
from gateway.service.output_reader import OutputReader, make_output_reader
from gateway.service.session import session_of
from gateway.settings.schema import RequestSettings
from gateway.upstreams.base import EventUpstream, PassThroughUpstream


class Conversations(Protocol):
    """What finished answers leave for later requests of the same key."""

    def get(self, owner: str, conversation_id: str) -> Any: ...

    def put(self, owner: str, conversation_id: str, items: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class Local:
    """An upstream that speaks events."""

    upstream: EventUpstream
    request: ChatRequest
    renderer: Renderer
    reader: OutputReader


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream that speaks the client's API: bytes pass through."""

    upstream: PassThroughUpstream
    plan: PassThroughPlan


@dataclass(frozen=True, slots=True)
class Translated:
    """An upstream that speaks only OpenAI's chat, for a client of another API."""

    upstream: PassThroughUpstream
    plan: PassThroughPlan
    renderer: Renderer


Answerer = Local | Remote | Translated


def make_renderer(
    exchange: Exchange, *, fields: Mapping[str, Any], include_usage: bool = True, chat_context: Any = None
) -> Renderer:
    """The exchange's renderer; errors and heartbeats of a stream go through it too."""
    call, route = exchange.call, exchange.route
    context = AnswerContext(
        request_id=call.request_id,
        created=int(exchange.started_at),
        model=exchange.model or (route.upstream_model if route else ""),
        include_usage=include_usage,
        body=fields,
        chat_context=chat_context,
    )
    exchange.renderer = call.dialect.renderer(context)
    return exchange.renderer


def local_request(
    exchange: Exchange,
    fields: Mapping[str, Any],
    parsed: ParsedBody,
    strategy: CacheStrategy,
    settings: RequestSettings,
) -> ChatRequest:
    """What the engine is asked."""
    call, route = exchange.call, exchange.route
    assert route is not None, "a call is routed before it is understood"
    return ChatRequest(
        request_id=call.request_id,
        model=exchange.model or route.upstream_model,
        prompt=parsed.prompt,
        sampling=parsed.sampling,
        strategy=replace(strategy, cache_salt=_salt(strategy.cache_salt, parsed.cache_salt)),
        stream=exchange.stream,
        include_usage=parsed.include_usage,
        deadline_seconds=settings.timeout_seconds,
        session=session_of(call.headers, fields, parsed.prompt),
    )


def reader_of(request: ChatRequest, card: ModelCard | None) -> OutputReader:
    """Reads text, reasoning and calls as the model writes them."""
    said = card.extra if card is not None else {}
    tool_format, reasoning_format = said.get("tool_format", ""), said.get("reasoning_format", "")
    return make_output_reader(request, tool_format=tool_format, reasoning_format=reasoning_format)


def advised(defaults: Defaults, card: ModelCard | None) -> Defaults:
    """What fills in: [request], then what the model's authors advise."""
    found = card.extra.get("default_sampling") if card is not None else None
    return replace(defaults, model_sampling=found) if found else defaults


def card_of(engine: EventUpstream, route: Route) -> ModelCard | None:
    return next((card for card in engine.models() if card.id == route.upstream_model), None)


def tools_notice(prompt: object, card: ModelCard | None) -> tuple[str, ...]:
    """How the model is told of the tools, and what becomes of calls that it writes."""
    if not isinstance(prompt, ChatPrompt) or not prompt.tools:
        return ()
    extra = card.extra if card is not None else {}
    takes_none = extra.get("template_takes_tools") is False
    said = "in a system message: the model's chat template takes none" if takes_none else "by its chat template"
    told = f"the model is told of the tools {said}"
    if prompt.forced_calls == 0 and not extra.get("tool_format"):
        return (f"{told}; calls that it writes come back as text, since how it marks them isn't known",)
    return (told,)


def _salt(of_key: str, asked: str) -> str:
    """Both, told apart: a request can narrow what its key shares, never reach into another key's."""
    return f"{len(of_key)}:{of_key}:{asked}" if asked else of_key
