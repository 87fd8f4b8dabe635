"""Answers one call: which strategy, which target, then the frames or the body. Owns counting and recording."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import GatewayError, InvalidRequest, ModelNotFound, Overloaded
from gateway.core.types import CacheStrategy, ChatRequest, ModelCard, Route
from gateway.dialects.sampling import Defaults
from gateway.metrics import Metrics
from gateway.records.store import RecordStore
from gateway.routing.router import Router
from gateway.service.body_rewrite import rewrite
from gateway.service.call import Call, Renderer
from gateway.service.exchange import Exchange, Outcome
from gateway.service.local import collect_events, stream_events
from gateway.service.passthrough import PassThroughPlan, collect_bytes, stream_bytes
from gateway.settings.schema import Settings
from gateway.strategy.resolve import BODY_FIELDS, resolve_strategy
from gateway.upstreams.base import EventUpstream, PassThroughUpstream, RawRequest

BACKEND_HEADER = "X-Cache-Backend"
_CONTROL_FIELDS = frozenset(BODY_FIELDS)
_OUR_HEADERS = ("x-cache-mode", "x-request-id")  # sent on with values of our own


@dataclass(frozen=True, slots=True)
class Local:
    """A call for an upstream that speaks events."""

    upstream: EventUpstream
    request: ChatRequest
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class Remote:
    """A call for an upstream that speaks the client's API."""

    upstream: PassThroughUpstream
    plan: PassThroughPlan


class ChatService:
    """One for the whole gateway. `begin`, then `prepare`, then `stream` or `whole`, and always `end`."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: EventUpstream | None,
        targets: Mapping[str, PassThroughUpstream],
        metrics: Metrics,
        records: RecordStore,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._targets = targets
        self._metrics = metrics
        self._records = records
        self._router = Router(settings)
        self._known_models = frozenset(self._router.model_names())
        self._num_in_flight = 0
        self._defaults = Defaults(
            temperature=settings.request.temperature,
            max_tokens=settings.request.max_tokens,
            max_stop_strings=settings.limits.max_stop_strings,
        )

    # ------------------------------------------------------------------------------------------------ life of a call

    def begin(self, call: Call) -> Exchange:
        """Raises `Overloaded` when too many are being answered already."""
        limit = self._settings.limits.max_concurrent_requests
        if self._num_in_flight >= limit:
            raise Overloaded(f"{limit} requests are being answered already. Try again.", retry_after_seconds=1)
        self._num_in_flight += 1
        self._metrics.in_flight.inc()
        return Exchange(call)

    def end(self, exchange: Exchange) -> None:
        self._num_in_flight -= 1
        self._metrics.in_flight.dec()
        if exchange.outcome is None:
            exchange.outcome = Outcome.CLIENT_GONE
        self._metrics.observe(exchange.figures())
        self._records.add(exchange.record())

    async def prepare(self, exchange: Exchange) -> Local | Remote:
        """Understand the call and choose who answers. Raises before anything is sent anywhere."""
        call = exchange.call
        exchange.stream = self._stream_flag(call)
        strategy, model = self._strategy(call)
        exchange.strategy, exchange.model = strategy, model
        exchange.note(strategy.notices)
        exchange.route = route = await self._route(model, call.headers.get(BACKEND_HEADER))
        upstream = self._targets.get(route.target)
        if upstream is not None:
            return self._remote(exchange, upstream, strategy, route)
        if self._engine is None or self._engine.name != route.target:
            raise ModelNotFound(model or route.upstream_model, self._router.model_names())
        return self._local(exchange, self._engine, strategy, route)

    def stream(self, exchange: Exchange, target: Local | Remote) -> AsyncGenerator[bytes, None]:
        """Frames of the answer. Closing it cancels the generation. Errors are raised, whatever was sent before."""
        exchange.content_type = "text/event-stream"
        exchange.sent_to_upstream_at = time.monotonic()
        if isinstance(target, Remote):
            return stream_bytes(exchange, target.upstream, target.plan)
        return stream_events(exchange, target.request, target.upstream.stream(target.request), target.renderer)

    async def whole(self, exchange: Exchange, target: Local | Remote) -> bytes:
        """The answer as one body."""
        exchange.sent_to_upstream_at = time.monotonic()
        if isinstance(target, Remote):
            return await collect_bytes(exchange, target.upstream, target.plan)
        return await collect_events(exchange, target.request, target.upstream.stream(target.request), target.renderer)

    # ---------------------------------------------------------------------------------------------- understand a call

    def _stream_flag(self, call: Call) -> bool:
        value = call.body.value("stream")
        if value is None:
            return bool(self._settings.request.stream)
        if not isinstance(value, bool):
            raise InvalidRequest("`stream` must be true or false.", param="stream")
        return value

    def _strategy(self, call: Call) -> tuple[CacheStrategy, str | None]:
        model = call.body.value("model")
        if model is not None and not isinstance(model, str):
            raise InvalidRequest("`model` must be a string.", param="model")
        key = call.key
        return resolve_strategy(
            settings=self._settings,
            header=call.headers.get("X-Cache-Mode"),
            body={name: call.body.value(name) for name in BODY_FIELDS if name in call.body.fields},
            query=call.query,
            path_mode=call.path_mode,
            model=model or None,
            key_mode=key.mode if key else None,
            cache_salt=key.name if key and key.salt_prefix_cache else "",
            known_models=self._known_models,
        )

    async def _route(self, model: str | None, forced: str | None) -> Route:
        try:
            return self._router.route(model, forced)
        except ModelNotFound:
            if not self._targets:
                raise
        self._use_cards(await self._remote_cards())  # a target may have new models
        return self._router.route(model, forced)

    async def _remote_cards(self) -> list[ModelCard]:
        lists = await asyncio.gather(*(target.models() for target in self._targets.values()))
        return [card for cards in lists for card in cards]

    def _use_cards(self, cards: Sequence[ModelCard]) -> None:
        self._router = Router(self._settings, cards)
        self._known_models = frozenset(self._router.model_names())

    # ------------------------------------------------------------------------------------------------- the local engine

    def _defaults_of(self, engine: EventUpstream, route: Route) -> Defaults:
        """What fills in: [request], then what the model's authors advise."""
        card = _card_of(engine, route)
        advised = card.extra.get("default_sampling") if card is not None else None
        return replace(self._defaults, model_sampling=advised) if advised else self._defaults

    def _local(self, exchange: Exchange, engine: EventUpstream, strategy: CacheStrategy, route: Route) -> Local:
        call = exchange.call
        parsed = call.dialect.parse(call.body.values(without=_CONTROL_FIELDS), self._defaults_of(engine, route))
        exchange.note(parsed.notices)
        if isinstance(parsed.prompt, ChatPrompt) and parsed.prompt.tools:
            exchange.note((_tools_notice(engine, route, forced=parsed.prompt.forced_calls > 0),))
        exchange.served_mode = strategy.mode.value
        exchange.variant = engine.variant_of(strategy)
        model = exchange.model or route.upstream_model
        request = ChatRequest(
            request_id=call.request_id,
            model=model,
            prompt=parsed.prompt,
            sampling=parsed.sampling,
            strategy=replace(strategy, cache_salt=_salt(strategy.cache_salt, parsed.cache_salt)),
            stream=exchange.stream,
            include_usage=parsed.include_usage,
            deadline_seconds=self._settings.request.timeout_seconds,
        )
        renderer = call.dialect.renderer(
            call.request_id, int(exchange.started_at), model, include_usage=parsed.include_usage
        )
        return Local(engine, request, renderer)

    # ---------------------------------------------------------------------------------------------------- pass-through

    def _remote(
        self, exchange: Exchange, upstream: PassThroughUpstream, strategy: CacheStrategy, route: Route
    ) -> Remote:
        call, body = exchange.call, exchange.call.body
        exchange.served_mode = "unknown"  # until the upstream itself confirms one
        exchange.note(_not_forwarded(strategy))
        said = body.value("model")
        replace: dict[str, Any] = {} if said == route.upstream_model or not said else {"model": route.upstream_model}
        add = self._fill_in(exchange, route)
        remove = set(_CONTROL_FIELDS | _null_fields(call, add))
        headers = self._headers(call, strategy)
        options = body.value("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        plain = RawRequest(
            call.dialect.path, rewrite(body, remove=remove, replace=replace, add=add), headers, exchange.stream
        )
        if not exchange.stream or asked or (options is not None and not isinstance(options, dict)):
            return Remote(upstream, PassThroughPlan(plain))
        with_usage = {**(options or {}), "include_usage": True}
        data = rewrite(
            body, remove=remove | {"stream_options"}, replace=replace, add=add | {"stream_options": with_usage}
        )
        request = RawRequest(call.dialect.path, data, headers, exchange.stream)
        return Remote(upstream, PassThroughPlan(request, without_usage=plain, strip_usage=True))

    def _fill_in(self, exchange: Exchange, route: Route) -> dict[str, Any]:
        """What the settings say for what the request leaves out."""
        body = exchange.call.body
        defaults = self._settings.request
        wanted: dict[str, Any] = {"model": route.upstream_model, "temperature": defaults.temperature}
        if body.value("max_completion_tokens") is None:
            wanted["max_tokens"] = defaults.max_tokens
        if exchange.stream:
            wanted["stream"] = True
        return {name: value for name, value in wanted.items() if value is not None and body.value(name) in (None, "")}

    def _headers(self, call: Call, strategy: CacheStrategy) -> dict[str, str]:
        """The client's headers; its key only if it isn't one of ours."""
        ours = ("authorization", "x-api-key", "api-key") if self._settings.keys else ()
        kept = {name: value for name, value in call.headers.items() if name.lower() not in (*ours, *_OUR_HEADERS)}
        return {**kept, "X-Cache-Mode": strategy.mode.value, "X-Request-Id": call.request_id}

    # ------------------------------------------------------------------------------------------------------ model list

    async def models(self) -> Sequence[ModelCard]:
        """Everything that can be asked for, local first."""
        cards = list(self._engine.models()) if self._engine is not None else []
        try:
            cards += await self._remote_cards()
        except GatewayError:
            return cards
        self._use_cards(cards)
        known = {card.id for card in cards}
        aliases = [name for name in self._router.model_names() if name not in known]
        return cards + [self._alias(name) for name in aliases]

    def _alias(self, name: str) -> ModelCard:
        try:
            target = self._router.route(name).target
        except GatewayError:
            target = "none"
        return ModelCard(id=name, target=target, owned_by=target)


def _null_fields(call: Call, add: Mapping[str, Any]) -> set[str]:
    """Fields that are there but say nothing, and are now filled in."""
    return {name for name in add if name in call.body.fields}


def _not_forwarded(strategy: CacheStrategy) -> tuple[str, ...]:
    neutral = CacheStrategy(strategy.mode, strategy.source)
    parts = ("chunk_size", "kv_cache_dtype", "transfer_mode")
    named = [part for part in parts if getattr(strategy, part) != getattr(neutral, part)]
    return (f"only the mode is forwarded to this upstream, not: {', '.join(named)}",) if named else ()


def _salt(of_key: str, asked: str) -> str:
    """Both, told apart: a request can narrow what its key shares, never reach into another key's."""
    return f"{len(of_key)}:{of_key}:{asked}" if asked else of_key


def _card_of(engine: EventUpstream, route: Route) -> ModelCard | None:
    return next((card for card in engine.models() if card.id == route.upstream_model), None)


def _tools_notice(engine: EventUpstream, route: Route, *, forced: bool) -> str:
    card = _card_of(engine, route)
    takes_none = card is not None and card.extra.get("template_takes_tools") is False
    if forced:
        said = "in a system message: the model's chat template takes none" if takes_none else "by its chat template"
        return f"the model is told of the tools {said}"
    if takes_none:
        return "tools have no effect: the model's chat template doesn't take them"
    return "tools are shown to the model; calls that it writes come back as text"
