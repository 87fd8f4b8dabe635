"""Answers one call: which strategy, which target, then the frames or the body. Owns counting and recording."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.core.errors import GatewayError, InvalidRequest, ModelNotFound, NotFound, Overloaded, TargetUnavailable
from gateway.core.types import CacheMode, CacheStrategy, ModelCard, Route
from gateway.dialects.base import ChatForm
from gateway.metrics import Metrics
from gateway.records.store import RecordStore
from gateway.routing.retry import RetryLimits
from gateway.routing.router import Router
from gateway.service.admission import Admission
from gateway.service.answerers import Answerer, Conversations, card_of
from gateway.service.asking import Asking
from gateway.service.attempts import Attempts, Option, Surroundings
from gateway.service.call import Call
from gateway.service.counting import count_elsewhere, count_here
from gateway.service.exchange import Exchange, Outcome
from gateway.service.exchange_facts import figures_of, record_of
from gateway.service.forwarding import CONTROL_FIELDS, count_request
from gateway.service.guard import TargetGuard, limits_of
from gateway.service.key_limits import check_allowed, may_use, may_use_mode
from gateway.settings.schema import KeySettings, RetrySettings, Settings
from gateway.strategy.resolve import BODY_FIELDS, resolve_strategy
from gateway.upstreams.base import EventUpstream, PassThroughUpstream

BACKEND_HEADER = "X-Cache-Backend"
_MODELS_RETRY_SECONDS = 5.0  # told to clients while a target does not say what it serves


class ChatService:
    """One for the whole gateway. `begin`, then `prepare`, then `stream` or `whole` of that, and always `end`."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: EventUpstream | None,
        targets: Mapping[str, PassThroughUpstream],
        metrics: Metrics,
        records: RecordStore,
        conversations: Conversations | None = None,
        admission: Admission | None = None,
        guards: Mapping[str, TargetGuard] | None = None,
    ) -> None:
        """`admission` and `guards` are those of a service that this one takes the place of."""
        self._settings = settings
        self._engine = engine
        self._targets = targets
        self._metrics = metrics
        self._records = records
        self._asking = Asking(settings, engine, targets, conversations)
        kept = guards or {}
        self._guards = {name: kept.get(name) or TargetGuard(name, limits_of(settings, name)) for name in targets}
        self._admission = admission or Admission(count_refusal=metrics.count_key_refusal)
        self._around = Surroundings(
            self._guards, _retry_limits(settings.retry), metrics.count_retry, first_is_out=self._let_client_read
        )
        self._router = Router(settings)
        self._known_models = frozenset(self._router.model_names())

    # ------------------------------------------------------------------------------------------------ life of a call

    def begin(self, call: Call) -> Exchange:
        """Raises `Overloaded` when too many are being answered already."""
        limit = self._settings.limits.max_concurrent_requests
        if self._admission.num_in_flight >= limit:
            raise Overloaded(f"{limit} requests are being answered already. Try again.", retry_after_seconds=1)
        self._admission.num_in_flight += 1
        self._metrics.in_flight.inc()
        return Exchange(call)

    def end(self, exchange: Exchange) -> None:
        self._admission.num_in_flight -= 1
        self._metrics.in_flight.dec()
        if exchange.outcome is None:
            exchange.outcome = Outcome.CLIENT_GONE
        self._admission.settle(exchange)
        self._metrics.observe(figures_of(exchange))
        self._records.add(record_of(exchange))
        exchange.error = None  # its traceback holds the exchange in turn: a large body would wait for a full collection

    def _let_client_read(self) -> None:
        """A client on this machine may be waiting for our very core, until all that is there has been passed on.

        Not while others wait for us too: the core is then worth more here.
        """
        if self._admission.num_in_flight == 1 and hasattr(os, "sched_yield"):
            os.sched_yield()

    async def prepare(self, exchange: Exchange) -> Attempts:
        """Understand the call and choose who answers. Raises before anything is sent anywhere."""
        call = exchange.call
        exchange.stream = self._stream_flag(call)
        strategy, model = self._strategy(call)
        exchange.strategy, exchange.model = strategy, model
        exchange.note(strategy.notices)
        exchange.route = route = await self._route(call, model)
        options = self._options(route, self._router.fallbacks(model, route), strategy, call.key)
        await self._admission.admit(exchange, [option.route for option in options])
        return Attempts(exchange, options, partial(self._make, exchange), self._around)

    def _options(
        self, route: Route, fallbacks: Sequence[Route], strategy: CacheStrategy, key: KeySettings | None
    ) -> list[Option]:
        """Who may answer, in order; the other mode comes last, and only where the settings and the key want it."""
        options = [Option(other, strategy) for other in (route, *fallbacks)]
        is_wanted = self._settings.retry.merged_for_split and (key is None or may_use_mode(key, CacheMode.MERGED))
        if is_wanted and strategy.mode is CacheMode.SPLIT:
            merged = replace(strategy, mode=CacheMode.MERGED)
            options += [Option(option.route, merged) for option in options if self._asking.is_both(option.route.target)]
        return options

    def _make(self, exchange: Exchange, option: Option) -> Answerer:
        return self._asking.make(exchange, option.route, option.strategy)

    async def count_tokens(
        self, call: Call, path: str, form_of: Callable[[Mapping[str, Any]], ChatForm]
    ) -> int | bytes:
        """How long a prompt is; or, in its own words, what an upstream at `path` says of it."""
        strategy, model = self._strategy(call)
        route = await self._route(call, model)
        if call.key is not None:
            check_allowed(call.key, model or route.upstream_model, strategy.mode)
        upstream = self._targets.get(route.target)
        if upstream is None:
            form, engine = form_of(call.body.values(without=CONTROL_FIELDS)), self._asking.engine_of(route)
            defaults = self._asking.defaults_of(card_of(engine, route))
            return await count_here(engine, call, strategy, form, defaults, around=self._around)
        if call.dialect.name not in upstream.dialects:
            raise NotFound(f"Upstream {route.target!r} can't count tokens.")
        request = count_request(call, self._settings, strategy, route, path)
        return await count_elsewhere(upstream, request, self._around)

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

    async def _route(self, call: Call, model: str | None) -> Route:
        try:
            return await self._known_route(model, call.headers.get(BACKEND_HEADER))
        except ModelNotFound as error:
            key = call.key
            if key is None or not key.models:
                raise
            raise ModelNotFound(model or "", [name for name in error.known if may_use(key, name)]) from None

    async def _known_route(self, model: str | None, forced: str | None) -> Route:
        try:
            return self._router.route(model, forced)
        except ModelNotFound:
            if not self._targets:
                raise
        self._use_cards(await self._remote_cards())  # a target may have new models
        try:
            return self._router.route(model, forced)
        except ModelNotFound:
            silent = ", ".join(name for name, target in self._targets.items() if not target.knows_models)
            if not silent:
                raise
            message = f"Nobody who answers serves this model, and {silent} has not said yet what it serves. Try again."
            raise TargetUnavailable(message, retry_after_seconds=_MODELS_RETRY_SECONDS) from None

    async def _remote_cards(self) -> list[ModelCard]:
        lists = await asyncio.gather(*(target.models() for target in self._targets.values()))
        return [card for cards in lists for card in cards]

    def _use_cards(self, cards: Sequence[ModelCard]) -> None:
        self._router = Router(self._settings, cards)
        self._known_models = frozenset(self._router.model_names())

    # --------------------------------------------------------------------------------------------------------- targets

    @property
    def guards(self) -> Mapping[str, TargetGuard]:
        return self._guards

    def target_figures(self) -> dict[str, dict[str, float]]:
        """Of each target at this moment, by the names of its metrics."""
        return {name: guard.figures() for name, guard in self._guards.items()}

    def target_health(self) -> dict[str, dict[str, object]]:
        """Of each target, in words."""
        return {name: guard.health() for name, guard in self._guards.items()}

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


def _retry_limits(settings: RetrySettings) -> RetryLimits:
    return RetryLimits(
        settings.max_attempts,
        settings.first_delay_seconds,
        settings.max_delay_seconds,
        settings.deadline_seconds,
        settings.max_retry_after_seconds,
    )
