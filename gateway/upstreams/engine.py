"""The bundled engine as an upstream: one request becomes a `Generate`, its answers become stream events.

Knows roles, modes and who has which KV dtype; processes and restarts are `fleet`'s, variants those of `variants`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    EngineStats,
    Failed,
    Generate,
    TokenChunk,
)
from gateway.core.errors import (
    ContextLengthExceeded,
    GatewayError,
    InternalError,
    InvalidRequest,
    KVPoolTooSmall,
    ModeUnavailable,
    Overloaded,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.types import (
    CacheMode,
    CacheStrategy,
    ChatRequest,
    ChoiceFinished,
    Finished,
    FinishReason,
    ModelCard,
    Started,
    StreamEvent,
    TextDelta,
)
from gateway.settings.schema import EngineSettings, Settings
from gateway.upstreams.availability import TAKER_OF_MODE, given_up, kv_dtype_refusal, taker, why_not
from gateway.upstreams.engine_config import (
    instance_name,
    instance_names,
    instance_plans,
    served_name,
    variant_cost,
    variant_plans,
)
from gateway.upstreams.engine_connection import Answer, EngineConnection
from gateway.upstreams.engine_process import COMMAND
from gateway.upstreams.fleet import Fleet
from gateway.upstreams.supervisor import InstanceReport, Policy
from gateway.upstreams.variant_machine import VariantKey, VariantPolicy
from gateway.upstreams.variants import EngineVariants, VariantReport

logger = logging.getLogger(__name__)

STATS_SECONDS = 1.5  # longest wait for figures (a scrape waits 2 s); an instance in a longer step has its last ones
RETRY_AFTER_SECONDS = 1.0


def _invalid(failed: Failed) -> GatewayError:
    return InvalidRequest(failed.message, param=failed.param)


ERROR_OF_CODE: dict[str, Callable[[Failed], GatewayError]] = {
    "invalid_request": _invalid,
    "context_length_exceeded": lambda failed: ContextLengthExceeded(failed.message, param=failed.param),
    "kv_pool_too_small": lambda failed: KVPoolTooSmall(failed.message, param=failed.param),
    "queue_full": lambda failed: Overloaded(failed.message, retry_after_seconds=RETRY_AFTER_SECONDS),
    "timeout": lambda failed: UpstreamTimeout(failed.message),
    "peer_lost": lambda failed: UpstreamGone(failed.message),
    "transfer_failed": lambda failed: UpstreamGone(failed.message),
    "draining": lambda failed: ModeUnavailable(failed.message, retry_after_seconds=RETRY_AFTER_SECONDS),
    "internal": lambda failed: InternalError(failed.message),
}


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
        policy: Policy | None = None,
        command: Sequence[str] = COMMAND,
        num_cores: int | None = None,
    ) -> None:
        self.name = engine.name
        self._settings = settings
        self._engine = engine
        self._num_cores = num_cores
        self._command = command
        self._served_name = served_name(engine)
        self._shutdown_seconds = settings.timeouts.shutdown_seconds
        self._policy = policy or Policy(
            ready_timeout_seconds=engine.ready_timeout_seconds, max_restarts=engine.max_restarts
        )
        plans = instance_plans(settings, engine, num_cores=num_cores)
        self._fleet = Fleet(plans, policy=self._policy, command=command)
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
        return [ModelCard(self._served_name, self.name, max_model_len=length, modes=modes, extra=extra)]

    def modes(self) -> Sequence[CacheMode]:
        return tuple(mode for mode in TAKER_OF_MODE if taker(self._fleet, mode) is not None)

    def ready_state(self) -> list[InstanceReport]:
        """Each instance as it is now. A decode side counts as starting until its prefill side is connected."""
        return self._fleet.reports()

    def variant_state(self) -> list[VariantReport]:
        """Each engine variant of the settings, also those that don't run."""
        return self._variants.reports()

    def instance_names(self) -> Sequence[str]:
        """Names under which `stats` may ever have figures."""
        return instance_names(self._engine)

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
        info = self._fleet.report(TAKER_OF_MODE[mode]).info
        if info is not None:
            self._kv_dtypes[mode] = info.kv_cache_dtype
        dtype = self._settings.kv_cache.kv_cache_dtype
        return self._kv_dtypes.get(mode) or (None if dtype == "auto" else dtype)

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        async with self._connection(request.strategy) as connection:
            channel = connection.open(generate_message(request))
            try:
                answer: Answer | None = None
                while not isinstance(answer, Done):
                    answer = await channel.next()
                    for event in events_of(answer):
                        yield event
            finally:
                channel.close()

    @asynccontextmanager
    async def _connection(self, strategy: CacheStrategy) -> AsyncIterator[EngineConnection]:
        """The way to who serves this strategy; a variant is kept running while it is used."""
        mode = strategy.mode
        variant = self.variant_of(strategy)
        if variant is None:
            if mode not in self._engine.modes or (connection := taker(self._fleet, mode)) is None:
                raise self._unavailable(mode)
            yield connection
            return
        key = VariantKey(mode, variant)
        async with self._variants.lease(key) as fleet:
            if (connection := taker(fleet, mode)) is None:
                reason = f"Engine variant {key} can't be served now: {why_not(fleet, mode)}."
                raise ModeUnavailable(reason, retry_after_seconds=RETRY_AFTER_SECONDS)
            yield connection

    def _unavailable(self, mode: CacheMode) -> ModeUnavailable:
        if mode not in self._engine.modes:
            enabled = ", ".join(mode.value for mode in self._engine.modes)
            return ModeUnavailable(f"Mode {mode.value!r} is not enabled here (engine.modes). Enabled: {enabled}.")
        states = why_not(self._fleet, mode)
        retry = None if self._given_up(mode) else RETRY_AFTER_SECONDS
        return ModeUnavailable(f"Mode {mode.value!r} can't be served now: {states}.", retry_after_seconds=retry)

    def _given_up(self, mode: CacheMode) -> bool:
        return mode not in self._engine.modes or given_up(self._fleet, mode)

    # -------------------------------------------------------------------------------------------------------- figures

    async def stats(self) -> dict[str, EngineStats]:
        """Figures of every live instance by name: its role, or `role[dtype]` for one of a variant.

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
        found = {instance_name(role): link for role, link in self._fleet.connections().items()}
        for key, fleet in self._variants.fleets().items():
            found |= {instance_name(role, key.kv_cache_dtype): link for role, link in fleet.connections().items()}
        return found


def generate_message(request: ChatRequest) -> Generate:
    strategy = request.strategy
    return Generate(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=request.sampling,
        cache=CacheParams(
            chunk_size=strategy.chunk_size,
            kv_cache_dtype=strategy.kv_cache_dtype,
            enable_prefix_cache=strategy.enable_prefix_cache,
            cache_salt=strategy.cache_salt,
            transfer_mode=strategy.transfer_mode,
        ),
        deadline_seconds=request.deadline_seconds,
    )


def events_of(answer: Answer) -> Sequence[StreamEvent]:
    """The stream events that one message means. Raises what a failure means."""
    match answer:
        case Accepted():
            return [Started(answer.prompt_tokens, answer.max_tokens, answer.notices)]
        case TokenChunk():
            delta = TextDelta(answer.text, len(answer.token_ids), answer.index, answer.logprobs)
            if answer.finish_reason is None:
                return [delta]
            return [delta, ChoiceFinished(answer.index, FinishReason(answer.finish_reason), answer.stop_reason)]
        case Done():
            rest = [TextDelta(answer.text, 0, answer.index)] if answer.text else []
            reason = FinishReason(answer.finish_reason)
            return [*rest, Finished(reason, answer.usage, answer.timings, answer.stop_reason, answer.index)]
        case Failed():
            raise ERROR_OF_CODE[answer.code](answer)


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
