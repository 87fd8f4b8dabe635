"""A call as each of those who may answer it has to be asked: understood by the engine, its own bytes, or translated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gateway.core.errors import InvalidRequest, ModelNotFound
from gateway.core.types import CacheMode, CacheStrategy, ModelCard, Route
from gateway.dialects.sampling import Defaults
from gateway.service.answerers import (
    Answerer,
    Conversations,
    Local,
    Remote,
    Translated,
    advised,
    card_of,
    local_request,
    make_renderer,
    reader_of,
    tools_notice,
)
from gateway.service.exchange import Exchange
from gateway.service.forwarding import CONTROL_FIELDS, own_bytes_plan, translated_plan
from gateway.settings.schema import Settings
from gateway.upstreams.base import EventUpstream, PassThroughUpstream

CHAT = "openai_chat"  # what every other chat API can be translated into


class Asking:
    """Makes answerers. What it learns of the call on the way is set in the exchange."""

    def __init__(
        self,
        settings: Settings,
        engine: EventUpstream | None,
        targets: Mapping[str, PassThroughUpstream],
        conversations: Conversations | None,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._targets = targets
        self._conversations = conversations
        self._defaults = Defaults(
            temperature=settings.request.temperature,
            max_tokens=settings.request.max_tokens,
            max_stop_strings=settings.limits.max_stop_strings,
        )

    def make(self, exchange: Exchange, route: Route, strategy: CacheStrategy) -> Answerer:
        """Raises what is wrong with the call for this target."""
        self._check_endpoints(route, strategy)
        exchange.route = route
        exchange.translated, exchange.variant, exchange.keep = False, None, None
        upstream = self._targets.get(route.target)
        if upstream is not None:
            return self._elsewhere(exchange, upstream, strategy, route)
        return self._local(exchange, self.engine_of(route), strategy, route)

    def engine_of(self, route: Route) -> EventUpstream:
        if self._engine is None or self._engine.name != route.target:
            raise ModelNotFound(route.upstream_model, tuple(self._targets))
        return self._engine

    def defaults_of(self, card: ModelCard | None) -> Defaults:
        return advised(self._defaults, card)

    def is_both(self, target: str) -> bool:
        """Whether it is the engine or a pair, serving both modes: one can stand in for the other."""
        if any(pair.name == target and pair.merged and pair.decode for pair in self._settings.pairs):
            return True
        engine = self._settings.effective_engine()
        return engine is not None and engine.name == target and set(CacheMode) <= set(engine.modes)

    def _check_endpoints(self, route: Route, strategy: CacheStrategy) -> None:
        """Servers of a pair that a request asks for are of no use at another target."""
        pairs = [pair for pair in self._settings.pairs if pair.name != route.target]
        for name, asked, side in (
            ("prefillEndpoint", strategy.prefill_endpoint, "prefill"),
            ("decodeEndpoint", strategy.decode_endpoint, "decode"),
        ):
            for pair in pairs:
                if asked is not None and asked in getattr(pair, side):
                    message = f"{name} is a server of target {pair.name!r}, and {route.target!r} answers."
                    raise InvalidRequest(f"{message} Choose it with X-Cache-Backend.", param=name)

    def _fields(self, exchange: Exchange) -> Mapping[str, Any]:
        """The decoded body, with what was remembered of earlier turns put in."""
        call, store = exchange.call, self._conversations
        fields: Mapping[str, Any] = call.body.values(without=CONTROL_FIELDS)
        if store is None or call.dialect.expand is None:
            return fields
        owner = call.key.name if call.key else ""
        exchange.keep = partial(store.put, owner)
        return call.dialect.expand(fields, partial(store.get, owner))

    def _local(self, exchange: Exchange, engine: EventUpstream, strategy: CacheStrategy, route: Route) -> Local:
        card, fields = card_of(engine, route), self._fields(exchange)
        parsed = exchange.call.dialect.parse(fields, self.defaults_of(card))
        exchange.note(parsed.notices)
        exchange.note(tools_notice(parsed.prompt, card))
        exchange.served_mode = strategy.mode.value
        exchange.variant = engine.variant_of(strategy)
        request = local_request(exchange, fields, parsed, strategy, self._settings.request)
        renderer = make_renderer(
            exchange, fields=fields, include_usage=parsed.include_usage, chat_context=parsed.context
        )
        return Local(engine, request, renderer, reader_of(request, card))

    def _elsewhere(
        self, exchange: Exchange, upstream: PassThroughUpstream, strategy: CacheStrategy, route: Route
    ) -> Remote | Translated:
        dialect = exchange.call.dialect
        exchange.served_mode = "unknown"  # until the upstream itself confirms one
        if dialect.name in upstream.dialects:
            make_renderer(exchange, fields={})
            return Remote(upstream, own_bytes_plan(exchange, self._settings, strategy, route))
        if dialect.to_chat is None or CHAT not in upstream.dialects:
            spoken = ", ".join(upstream.dialects)
            reason = f"Upstream {route.target!r} speaks {spoken}; {dialect.name} can't be translated into that."
            raise InvalidRequest(reason, param="model")
        fields = self._fields(exchange)
        form = dialect.to_chat(fields)
        exchange.note(form.notices)
        exchange.translated = True
        plan = translated_plan(exchange, self._settings, strategy, route, form)
        return Translated(upstream, plan, make_renderer(exchange, fields=fields, chat_context=form.context))
