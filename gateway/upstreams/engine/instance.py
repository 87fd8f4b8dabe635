"""One engine instance that is kept alive: carries out what its state machine decides, one event after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from backends.protocol.messages import (
    PROTOCOL_VERSION,
    FromEngine,
    PeerState,
    Ready,
    Role,
    StartFailed,
)
from gateway.core.errors import UpstreamGone
from gateway.upstreams.engine.connection import EngineConnection
from gateway.upstreams.engine.process import EngineProcess, spawn_engine
from gateway.upstreams.engine.supervisor import (
    SHUTTING_DOWN,
    CameUp,
    CouldNotStart,
    Effect,
    Event,
    Exited,
    Hung,
    InstanceMachine,
    InstanceReport,
    InstanceState,
    LinkLost,
    Policy,
    ProbeAnswered,
    Start,
    Stop,
    StopSoon,
    Tick,
)

logger = logging.getLogger(__name__)


class EngineInstance:
    """One named instance of a role, in whichever process it lives at the moment.

    `changed` is called after every change of state, `peer_state` with what a decode side says of its connection.
    """

    def __init__(
        self,
        role: Role,
        config: dict[str, Any],
        *,
        name: str,
        policy: Policy,
        command: Sequence[str],
        changed: Callable[[], None],
        peer_state: Callable[[PeerState], None],
    ) -> None:
        self.role: Role = role
        self.name = name
        self._config = config
        self._command = command
        self._changed = changed
        self._peer_state = peer_state
        self._machine = InstanceMachine(policy)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._process: EngineProcess | None = None
        self._connection: EngineConnection | None = None
        self._actor: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None

    # -------------------------------------------------------------------------------------------- what others ask

    @property
    def state(self) -> InstanceState:
        return self._machine.state

    @property
    def connection(self) -> EngineConnection | None:
        """The way to a ready instance; None in every other state."""
        return self._connection if self._machine.state is InstanceState.READY else None

    @property
    def process(self) -> EngineProcess | None:
        return self._process

    def report(self) -> InstanceReport:
        return InstanceReport(
            role=self.role,
            state=self._machine.state,
            reason=self._machine.reason,
            pid=self._process.pid if self._process else None,
            num_restarts=self._machine.num_restarts,
            info=self._machine.info,
            name=self.name,
            start_seconds=self._machine.start_seconds,
        )

    def start(self) -> None:
        self._actor = asyncio.get_running_loop().create_task(self._act(), name=f"{self.name} instance")
        self._events.put_nowait(Start())

    def hung(self, reason: str) -> None:
        """Kill the process at once, whatever it is doing, and start another."""
        self._events.put_nowait(Hung(reason))

    def stop_soon(self, reason: str = SHUTTING_DOWN) -> None:
        """`stop` will follow; if the process ends before, that is no failure."""
        self._events.put_nowait(StopSoon(reason))

    async def stop(self, seconds: float, reason: str = SHUTTING_DOWN) -> None:
        """Let requests finish for that long, then end the process; returns when it is gone."""
        if self._actor is None:
            return
        self._events.put_nowait(Stop(seconds, reason))
        await self._actor
        self._actor = None

    # ----------------------------------------------------------------------------------------------- the process says

    def received(self, message: FromEngine) -> None:
        match message:
            case Ready(protocol_version=version) if version != PROTOCOL_VERSION:
                reason = f"it speaks protocol version {version}, the gateway {PROTOCOL_VERSION}"
                self._events.put_nowait(CouldNotStart(reason))
            case Ready(info=info) if info.role != self.role:
                self._events.put_nowait(CouldNotStart(f"it came up as {info.role}, and was started as {self.role}"))
            case Ready(info=info):
                self._events.put_nowait(CameUp(info))
            case StartFailed(message=reason):
                self._events.put_nowait(CouldNotStart(reason))
            case PeerState():
                self._peer_state(message)
            case _:
                if self._connection is not None:
                    self._connection.take(message)

    def lost(self, reason: str) -> None:
        """Open streams end now; the state follows with its event."""
        if self._connection is not None:
            self._connection.lost(reason)
            self._connection = None
        self._events.put_nowait(LinkLost())

    def exited(self, reason: str) -> None:
        self._process = None
        self._events.put_nowait(Exited(reason))

    # ------------------------------------------------------------------------------------------------------ the actor

    async def _act(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            event = await self._next_event()
            before = self._machine.state
            for effect in self._machine.handle(event, loop.time()):
                await self._carry_out(effect)
            self._log_change(before)
            self._changed()
            if self._machine.state is InstanceState.STOPPED:
                return

    async def _next_event(self) -> Event:
        deadline = self._machine.deadline
        try:
            async with asyncio.timeout_at(deadline):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Effect.SPAWN:
                await self._spawn()
            case Effect.PROBE:
                self._probe = asyncio.get_running_loop().create_task(self._ask())
            case Effect.DRAIN:
                if self._connection is not None:
                    self._connection.drain()
            case Effect.TERMINATE:
                if self._process is not None:
                    self._process.terminate()
            case Effect.KILL:
                if self._process is not None:
                    self._process.kill()
            case _:
                assert_never(effect)

    async def _spawn(self) -> None:
        try:
            self._process = await spawn_engine(self._command, self._config, self)
        except Exception as error:  # whatever it is, the instance must not stay "starting" for ever
            if not isinstance(error, OSError):
                logger.exception("%s engine: starting it failed", self.name)
            self._events.put_nowait(CouldNotStart(f"no process could be started: {error}", has_process=False))
            return
        self._connection = EngineConnection(self._process.link, self.name)

    async def _ask(self) -> None:
        if self._connection is None:
            return
        try:
            await self._connection.ping()
        except UpstreamGone:
            return
        self._events.put_nowait(ProbeAnswered())

    def _log_change(self, before: InstanceState) -> None:
        state = self._machine.state
        if state is before:
            return
        level = logging.WARNING if state in (InstanceState.RESTARTING, InstanceState.FAILED) else logging.INFO
        reason = f": {self._machine.reason}" if self._machine.reason else ""
        logger.log(level, "%s engine: %s -> %s%s", self.name, before, state, reason)
