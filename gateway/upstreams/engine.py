"""The bundled engine as an upstream: one request becomes a `Generate`, its answers become stream events.

Knows roles and modes; processes and restarts are `fleet`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    EngineStats,
    Failed,
    Generate,
    Role,
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
    ChatRequest,
    Finished,
    FinishReason,
    ModelCard,
    Started,
    StreamEvent,
    TextDelta,
)
from gateway.settings.schema import EngineSettings, Settings
from gateway.upstreams.engine_config import ROLES_OF_MODE, instance_plans, served_name, start_notices
from gateway.upstreams.engine_connection import Answer, EngineConnection
from gateway.upstreams.engine_process import COMMAND
from gateway.upstreams.fleet import Fleet
from gateway.upstreams.supervisor import InstanceReport, InstanceState, Policy

logger = logging.getLogger(__name__)

TAKER_OF_MODE: dict[CacheMode, Role] = {CacheMode.MERGED: "merged", CacheMode.SPLIT: "decode"}
STATS_SECONDS = 1.5  # longest wait for figures (a scrape waits 2 s): an instance in a longer step is left out
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
        self.notices: tuple[str, ...] = tuple(start_notices(settings, engine))
        self._engine = engine
        self._served_name = served_name(engine)
        self._shutdown_seconds = settings.timeouts.shutdown_seconds
        self._policy = policy or Policy(
            ready_timeout_seconds=engine.ready_timeout_seconds, max_restarts=engine.max_restarts
        )
        plans = instance_plans(settings, engine, num_cores=num_cores)
        self._fleet = Fleet(plans, policy=self._policy, command=command)

    async def start(self) -> None:
        for notice in self.notices:
            logger.warning("%s", notice)
        await self._fleet.start()

    async def close(self) -> None:
        await self._fleet.stop(self._shutdown_seconds)

    # ------------------------------------------------------------------------------------------------ what is served

    def models(self) -> Sequence[ModelCard]:
        """One model. `modes` are those configured; `modes()` says which of them can be served at this moment."""
        infos = [report.info for report in self._fleet.reports() if report.info]
        length = min((info.max_model_len for info in infos), default=self._engine.max_model_len)
        modes = tuple(mode for mode in CacheMode if mode in self._engine.modes)
        takes_tools = {"template_takes_tools": any(info.template_takes_tools for info in infos)} if infos else {}
        return [ModelCard(self._served_name, self.name, max_model_len=length, modes=modes, extra=takes_tools)]

    def modes(self) -> Sequence[CacheMode]:
        return tuple(mode for mode, role in TAKER_OF_MODE.items() if self._fleet.connection(role) is not None)

    def ready_state(self) -> list[InstanceReport]:
        """Each instance as it is now. A decode side counts as starting until its prefill side is connected."""
        return self._fleet.reports()

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

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        channel = self._connection(request.strategy.mode).open(generate_message(request))
        try:
            answer: Answer | None = None
            while not isinstance(answer, Done):
                answer = await channel.next()
                for event in events_of(answer):
                    yield event
        finally:
            channel.close()

    def _connection(self, mode: CacheMode) -> EngineConnection:
        connection = self._fleet.connection(TAKER_OF_MODE[mode])
        if connection is None:
            raise self._unavailable(mode)
        return connection

    def _unavailable(self, mode: CacheMode) -> ModeUnavailable:
        if mode not in self._engine.modes:
            enabled = ", ".join(mode.value for mode in self._engine.modes)
            return ModeUnavailable(f"Mode {mode.value!r} is not enabled here (engine.modes). Enabled: {enabled}.")
        reports = [self._fleet.report(role) for role in ROLES_OF_MODE[mode]]
        states = "; ".join(
            f"{report.role} is {report.state.value}" + (f" ({report.reason})" if report.reason else "")
            for report in reports
            if report.state is not InstanceState.READY
        )
        retry = None if self._given_up(mode) else RETRY_AFTER_SECONDS
        return ModeUnavailable(f"Mode {mode.value!r} can't be served now: {states}.", retry_after_seconds=retry)

    def _given_up(self, mode: CacheMode) -> bool:
        if mode not in self._engine.modes:
            return True
        over = (InstanceState.FAILED, InstanceState.STOPPED)
        return any(self._fleet.report(role).state in over for role in ROLES_OF_MODE[mode])

    # -------------------------------------------------------------------------------------------------------- figures

    async def stats(self) -> dict[Role, EngineStats]:
        """Figures of every instance that answers, by role."""
        return await self._ask_all(lambda connection: connection.stats())

    async def reset_peaks(self, *, clear_prefix_cache: bool = False) -> dict[Role, EngineStats]:
        """Start new peaks on every instance; the figures right after."""
        return await self._ask_all(lambda connection: connection.reset_peaks(clear_prefix_cache=clear_prefix_cache))

    async def _ask_all(self, ask: Callable[[EngineConnection], Awaitable[EngineStats]]) -> dict[Role, EngineStats]:
        connections = self._fleet.connections()
        answers = await asyncio.gather(*(_answer_or_none(ask(connection)) for connection in connections.values()))
        return {role: stats for role, stats in zip(connections, answers, strict=True) if stats is not None}


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
            return [TextDelta(answer.text, len(answer.token_ids))]
        case Done():
            rest = [TextDelta(answer.text, 0)] if answer.text else []
            reason = FinishReason(answer.finish_reason)
            return [*rest, Finished(reason, answer.usage, answer.timings, answer.stop_reason)]
        case Failed():
            raise ERROR_OF_CODE[answer.code](answer)


async def _answer_or_none(question: Awaitable[EngineStats]) -> EngineStats | None:
    """None from an instance that has just died, or that is in a very long step."""
    try:
        return await asyncio.wait_for(question, STATS_SECONDS)
    except (TimeoutError, UpstreamGone):
        return None
