"""The bundled engine as an upstream: one request becomes a `Generate`, its answers become stream events.

Knows roles, modes and who has which KV dtype; processes and restarts are `fleet`'s, variants those of `variants`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from backends.protocol.messages import EngineStats
from gateway.core.errors import InvalidRequest, ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, CacheStrategy, ChatRequest, ModelCard, StreamEvent
from gateway.settings.schema import EngineSettings, Settings
from gateway.upstreams.choosing import Chooser
from gateway.upstreams.engine.attempts import stream_from_any
from gateway.upstreams.engine.availability import (
    TAKER_OF_MODE,
    given_up,
    kv_dtype_refusal,
    restart_seconds,
    takers,
    why_not,
)
from gateway.upstreams.engine.config import instance_names, instance_plans, variant_cost, variant_plans
from gateway.upstreams.engine.connection import EngineConnection
from gateway.upstreams.engine.fleet import Fleet
from gateway.upstreams.engine.messages import ERROR_OF_CODE, RETRY_AFTER_SECONDS, events_of, generate_message
from gateway.upstreams.engine.pairs import PairReport
from gateway.upstreams.engine.process import COMMAND
from gateway.upstreams.engine.supervisor import InstanceReport, Policy
from gateway.upstreams.engine.variant_events import VariantKey
from gateway.upstreams.engine.variant_machine import VariantPolicy
from gateway.upstreams.engine.variants import EngineVariants, VariantReport

logger = logging.getLogger(__name__)

STATS_SECONDS = 1.5  # longest wait for figures (a scrape waits 2 s); an instance in a longer step has its last ones


class EngineUpstream:
    """Serves both cache modes from instances that it starts, watches and restarts.

    `start` returns before they are ready: requests until then are refused with the state and its reason. `close` ends
    every process, in any case.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineSettings,
        *,
        make_chooser: Callable[[], Chooser],
        policy: Policy | None = None,
        command: Sequence[str] = COMMAND,
        num_cores: int | None = None,
    ) -> None:
        self.name = engine.name
        self._settings = settings
        self._engine = engine
        self._num_cores = num_cores
        self._command = command
        self._served_name = engine.public_name()
        self._shutdown_seconds = settings.timeouts.shutdown_seconds
        self._policy = policy or Policy(
            ready_timeout_seconds=engine.ready_timeout_seconds, max_restarts=engine.max_restarts
        )
        plans = instance_plans(settings, engine, num_cores=num_cores)
        self._fleet = Fleet(plans, policy=self._policy, command=command)
        self._make_chooser = make_chooser
        self._choosers: dict[VariantKey, Chooser] = {}  # one for each set of instances that are alike
        self._kv_dtypes: dict[CacheMode, str] = {}  # of the main engine, as last seen
        self._variants = EngineVariants(
            [VariantKey(mode, dtype) for mode in engine.modes for dtype in engine.kv_cache_variants],
            VariantPolicy(engine.max_variants, engine.variant_idle_seconds, engine.ready_timeout_seconds),
            make_fleet=self._variant_fleet,
            cost=variant_cost(settings, engine),
            stop_seconds=self._shutdown_seconds,
        )

    async def start(self) -> None:
        await self._fleet.start()

    def stop_soon(self) -> None:
        """`close` will follow: an instance that ends before, told to by others, is not started again."""
        self._fleet.stop_soon()
        self._variants.stop_soon()

    async def close(self) -> None:
        await asyncio.gather(self._fleet.stop(self._shutdown_seconds), self._variants.close())

    def _variant_fleet(self, key: VariantKey) -> Fleet:
        plans = variant_plans(self._settings, self._engine, key.mode, key.kv_cache_dtype, num_cores=self._num_cores)
        return Fleet(plans, policy=self._policy, command=self._command)

    # ------------------------------------------------------------------------------------------------ what is served

    def models(self) -> Sequence[ModelCard]:
        """One model. `modes` are those configured; `modes()` says which of them can be served at this moment."""
        infos = [report.info for report in self._fleet.reports() if report.info]
        length = min((info.max_model_len for info in infos), default=self._engine.max_model_len)
        modes = tuple(mode for mode in CacheMode if mode in self._engine.modes)
        extra: dict[str, Any] = {}
        if infos:
            extra["template_takes_tools"] = any(info.template_takes_tools for info in infos)
            extra["default_sampling"] = infos[0].default_sampling
            extra |= {"tool_format": infos[0].tool_format, "reasoning_format": infos[0].reasoning_format}
            if infos[0].rope_scaling:
                scaled = {"rope_scaling": infos[0].rope_scaling, "native_max_model_len": infos[0].native_max_model_len}
                extra |= scaled
        return [ModelCard(self._served_name, self.name, max_model_len=length, modes=modes, extra=extra)]

    def modes(self) -> Sequence[CacheMode]:
        return tuple(mode for mode in TAKER_OF_MODE if takers(self._fleet, mode))

    def ready_state(self) -> list[InstanceReport]:
        """Each instance as it is now. A decode side counts as starting until its prefill side is connected."""
        return self._fleet.reports()

    def pair_state(self) -> list[PairReport]:
        """Every prefill with every decode instance of the main engine; those of variants are in `variant_state`."""
        return self._fleet.pairs()

    def variant_state(self) -> list[VariantReport]:
        """Each engine variant of the settings, also those that don't run."""
        return self._variants.reports()

    def instance_names(self) -> Sequence[str]:
        """Names under which `stats` may ever have figures."""
        return instance_names(self._settings, self._engine)

    async def wait_ready(self, *, modes: Sequence[CacheMode] | None = None) -> None:
        """Return when the modes (all that are configured) can be served; raise ModeUnavailable if one never will."""
        wanted = tuple(modes if modes is not None else self._engine.modes)
        await self.wait_until(lambda: set(wanted) <= set(self.modes()) or any(map(self._given_up, wanted)))
        for mode in wanted:
            if self._given_up(mode):
                raise self._unavailable(mode)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is asked again after each change of any instance."""
        await self._fleet.wait_until(condition)

    # ---------------------------------------------------------------------------------------------------- one request

    def variant_of(self, strategy: CacheStrategy) -> str | None:
        """The KV dtype of the engine variant that serves this strategy; None: the main engine does.

        Raises InvalidRequest if none can. Nothing is refused while the main engine's own dtype isn't known yet.
        """
        asked, mode = strategy.kv_cache_dtype, strategy.mode
        if asked == "auto" or mode not in self._engine.modes:
            return None
        own = self._own_kv_dtype(mode)
        if asked == own or (own is None and not self._given_up(mode)):
            return None
        variants = self._engine.kv_cache_variants
        if asked in variants:
            return asked
        raise InvalidRequest(kv_dtype_refusal(asked, mode, own, variants), param="kvCacheDtype")

    def _own_kv_dtype(self, mode: CacheMode) -> str | None:
        """Of the main engine. None before it was first ready, if the settings leave the choice to it."""
        for report in self._fleet.reports(TAKER_OF_MODE[mode]):
            if report.info is not None:
                self._kv_dtypes[mode] = report.info.kv_cache_dtype
        dtype = self._settings.kv_cache.kv_cache_dtype
        return self._kv_dtypes.get(mode) or (None if dtype == "auto" else dtype)

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        """As the Protocol says; `Started` comes again if another instance takes over before the first output."""
        mode = request.strategy.mode
        async with self._serving(request.strategy) as (fleet, key):
            if key not in self._choosers:
                self._choosers[key] = self._make_chooser()
            options = partial(takers, fleet, mode)
            generate = generate_message(request)
            async with aclosing(stream_from_any(options, self._choosers[key], request, generate, events_of)) as events:
                async for event in events:
                    yield event

    async def back(self, strategy: CacheStrategy) -> None:
        """Wait while what serves this strategy is down, but not if it was given up."""
        mode, variant = strategy.mode, self.variant_of(strategy)
        fleet = self._fleet if variant is None else self._variants.fleets().get(VariantKey(mode, variant))
        if fleet is not None:
            await fleet.wait_until(lambda: bool(takers(fleet, mode)) or given_up(fleet, mode))

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the rendered prompt, counted by whichever instance is there. Raises like `stream`."""
        mode = request.strategy.mode
        options = [taker for other in (mode, *TAKER_OF_MODE) for taker in takers(self._fleet, other)]
        if not options:
            raise self._unavailable(mode)
        answer = await options[0].connection.count_tokens(request.prompt)
        if answer.failed is not None:
            raise ERROR_OF_CODE[answer.failed.code](answer.failed)
        return answer.prompt_tokens

    @asynccontextmanager
    async def _serving(self, strategy: CacheStrategy) -> AsyncIterator[tuple[Fleet, VariantKey]]:
        """Instances that serve this strategy, at least one of them up; a variant is kept running while it is used."""
        mode = strategy.mode
        variant = self.variant_of(strategy)
        if variant is None:
            if mode not in self._engine.modes or not takers(self._fleet, mode):
                raise self._unavailable(mode)
            yield self._fleet, VariantKey(mode, "")
            return
        key = VariantKey(mode, variant)
        async with self._variants.lease(key) as fleet:
            if not takers(fleet, mode):
                raise _down(fleet, mode, f"Engine variant {key} can't be served now: {why_not(fleet, mode)}.")
            yield fleet, key

    def _unavailable(self, mode: CacheMode) -> ModeUnavailable:
        if mode not in self._engine.modes:
            enabled = ", ".join(mode.value for mode in self._engine.modes)
            return ModeUnavailable(f"Mode {mode.value!r} is not enabled here (engine.modes). Enabled: {enabled}.")
        reason = f"Mode {mode.value!r} can't be served now: {why_not(self._fleet, mode)}."
        return ModeUnavailable(reason) if self._given_up(mode) else _down(self._fleet, mode, reason)

    def _given_up(self, mode: CacheMode) -> bool:
        return mode not in self._engine.modes or given_up(self._fleet, mode)

    # -------------------------------------------------------------------------------------------------------- figures

    async def stats(self) -> dict[str, EngineStats]:
        """Figures of every live instance by name: `decode`, `decode-1` of several, `decode-1[int8]` of a variant.

        One that is in a very long step gives its last ones, with their age in `stale_seconds`.
        """
        connections = self._connections()
        answers = await _ask_all(connections, lambda connection: connection.stats())
        late = {name: connection.last_stats() for name, connection in connections.items() if name not in answers}
        found = {name: answers.get(name) or late[name] for name in connections}
        return {name: stats for name, stats in found.items() if stats is not None}

    async def reset_peaks(self, *, clear_prefix_cache: bool = False) -> dict[str, EngineStats]:
        """Start new peaks on every instance; the figures right after, of those that are not in a very long step."""
        reset = lambda connection: connection.reset_peaks(clear_prefix_cache=clear_prefix_cache)  # noqa: E731
        return await _ask_all(self._connections(), reset)

    def _connections(self) -> dict[str, EngineConnection]:
        """Of every live instance, by name."""
        found = self._fleet.connections()
        for fleet in self._variants.fleets().values():
            found |= fleet.connections()
        return found


def _down(fleet: Fleet, mode: CacheMode, reason: str) -> ModeUnavailable:
    """For now. A restart takes about as long as the start before it."""
    seconds = restart_seconds(fleet, mode)
    retry = max(RETRY_AFTER_SECONDS, seconds or 0.0)
    return ModeUnavailable(reason, retry_after_seconds=retry, is_restarting=seconds is not None)


async def _ask_all(
    connections: Mapping[str, EngineConnection], ask: Callable[[EngineConnection], Awaitable[EngineStats]]
) -> dict[str, EngineStats]:
    answers = await asyncio.gather(*(_answer_or_none(ask(connection)) for connection in connections.values()))
    return {name: stats for name, stats in zip(connections, answers, strict=True) if stats is not None}


async def _answer_or_none(question: Awaitable[EngineStats]) -> EngineStats | None:
    """None from an instance that has just died, or that is in a very long step."""
    try:
        return await asyncio.wait_for(question, STATS_SECONDS)
    except (TimeoutError, UpstreamGone):
        return None
