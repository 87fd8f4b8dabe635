"""The life of one engine instance as a state machine: events in, effects out. Knows no process, socket or clock.

starting -> ready -> (lost) restarting -> starting -> ...
Any of them -> draining -> stopped; starting or restarting -> failed: given up, with the last reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from backends.protocol.messages import EngineInfo, Role

SHUTTING_DOWN = "the gateway is shutting down"


class InstanceState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the supervisor is."""

    ready_timeout_seconds: float = 300.0
    max_restarts: int = 5  # within `restart_window_seconds`; one more is not tried
    restart_window_seconds: float = 60.0
    first_restart_seconds: float = 0.2  # doubled with each restart in the window
    longest_restart_seconds: float = 10.0
    probe_interval_seconds: float = 2.0
    probe_deadline_seconds: float = 30.0  # a step over a long prompt may take many seconds
    exit_seconds: float = 2.0  # from the end of its connection, or SIGTERM, to SIGKILL


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What /ready and /health say of one instance."""

    role: Role
    state: InstanceState
    reason: str  # why it isn't ready; empty if it is
    pid: int | None
    num_restarts: int
    info: EngineInfo | None
    name: str = ""  # of the instance; its role, where it is the only one of it
    start_seconds: float | None = None  # how long its last start took; None = it was never ready


# ------------------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class CameUp:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class CouldNotStart:
    """The instance said so itself, or could not be made at all."""

    reason: str
    has_process: bool = True  # its exit will be reported too


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Its connection ended: it died, or is about to."""


@dataclass(frozen=True, slots=True)
class Exited:
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    pass


@dataclass(frozen=True, slots=True)
class Hung:
    """Others say that it no longer answers: it must end now, since it may hold or write what is theirs."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what runs within `seconds`, then end whatever happens."""

    seconds: float
    reason: str = SHUTTING_DOWN


@dataclass(frozen=True, slots=True)
class StopSoon:
    """A `Stop` will follow: from now on an end is not a failure. Others may have told the process to end already."""

    reason: str = SHUTTING_DOWN


@dataclass(frozen=True, slots=True)
class Tick:
    """`deadline` may have come."""


Event = Start | CameUp | CouldNotStart | LinkLost | Exited | ProbeAnswered | Hung | Stop | StopSoon | Tick


class Effect(StrEnum):
    SPAWN = "spawn"
    PROBE = "probe"
    DRAIN = "drain"
    TERMINATE = "terminate"
    KILL = "kill"


class InstanceMachine:
    """Decides what to do with one instance. `deadline` is when it wants a `Tick`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state = InstanceState.STARTING  # the first event is Start
        self.reason = ""
        self.info: EngineInfo | None = None
        self.num_restarts = 0
        self.deadline: float | None = None
        self.start_seconds: float | None = None  # of the last start that came to an end
        self._spawned_at = 0.0
        self._restarts: deque[float] = deque()
        self._was_ready = False
        self._probing = False
        self._ending = False  # the process is ending, or was told to: the next deadline kills it
        self._why = ""  # what made us end it; says more than that it was killed
        self._stop_reason = ""  # why a `Stop` will follow
        self._hopeless = False  # it said that it can't serve: a restart would say the same

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Start():
                effects = self._spawn(now)
            case CameUp(info=info):
                self._came_up(info, now)
            case CouldNotStart():
                self._could_not_start(event, now)
            case LinkLost():
                self._end_soon(now)
            case Exited(reason=reason):
                self._exited(reason, now)
            case ProbeAnswered():
                self._probe_answered(now)
            case Hung(reason=reason):
                effects = self._hung(reason)
            case Stop() | StopSoon():
                effects = self._told_to_stop(event, now)
            case Tick():
                effects = self._tick(now) if self.deadline is not None and now >= self.deadline else []
        return effects

    # ---------------------------------------------------------------------------------------------------- start, live

    def _spawn(self, now: float) -> list[Effect]:
        self.state = InstanceState.STARTING
        self._spawned_at = now
        self.deadline = now + self._policy.ready_timeout_seconds
        self.info = None
        self._probing = self._ending = self._hopeless = False
        self._why = ""
        return [Effect.SPAWN]

    def _came_up(self, info: EngineInfo, now: float) -> None:
        if self.state is not InstanceState.STARTING or self._ending:
            return
        self.state = InstanceState.READY
        self.info = info
        self.reason = ""
        self.start_seconds = now - self._spawned_at
        self._was_ready = True
        self.deadline = now + self._policy.probe_interval_seconds

    def _probe_answered(self, now: float) -> None:
        if self._probing and not self._ending and self.state is InstanceState.READY:
            self._probing = False
            self.deadline = now + self._policy.probe_interval_seconds

    # ------------------------------------------------------------------------------------------------------------ end

    def _hung(self, reason: str) -> list[Effect]:
        """A process that drains is killed as well: it holds up what waits for it."""
        if self.state is InstanceState.READY:
            self.state = InstanceState.DRAINING if self._stop_reason else InstanceState.RESTARTING
            self.info = None
            return self._kill(reason)
        return [Effect.KILL] if self.state is InstanceState.DRAINING else []

    def _could_not_start(self, event: CouldNotStart, now: float) -> None:
        self._why = self.reason = event.reason
        self._hopeless = not self._was_ready
        if event.has_process:
            self._end_soon(now)
        else:
            self._exited(event.reason, now)

    def _end_soon(self, now: float) -> None:
        """It is on its way out by itself; see that it gets there."""
        if self.state is InstanceState.DRAINING:
            return
        if self.state is InstanceState.READY:
            self.state = InstanceState.DRAINING if self._stop_reason else InstanceState.RESTARTING
            self.reason, self.info = self._stop_reason or "its connection ended", None
        self._ending = True
        self.deadline = now + self._policy.exit_seconds

    def _exited(self, reason: str, now: float) -> None:
        self.info = None
        self.deadline = None
        if self._stop_reason or self.state in (InstanceState.DRAINING, InstanceState.STOPPED):
            self.state = InstanceState.STOPPED
            return
        self.reason = self._why or reason
        self._forget_old_restarts(now)
        if self._hopeless or len(self._restarts) >= self._policy.max_restarts:
            self.state = InstanceState.FAILED
            return
        self.state = InstanceState.RESTARTING
        delay = self._policy.first_restart_seconds * 2 ** len(self._restarts)
        self.deadline = now + min(delay, self._policy.longest_restart_seconds)
        self._ending = False
        self._restarts.append(now)

    def _forget_old_restarts(self, now: float) -> None:
        while self._restarts and self._restarts[0] <= now - self._policy.restart_window_seconds:
            self._restarts.popleft()

    def _told_to_stop(self, event: Stop | StopSoon, now: float) -> list[Effect]:
        if isinstance(event, Stop):
            return self._stop(event.seconds, event.reason, now)
        self._stop_reason = event.reason
        return []

    def _stop(self, seconds: float, reason: str, now: float) -> list[Effect]:
        before = self.state
        if before in (InstanceState.DRAINING, InstanceState.STOPPED):
            return []
        has_no_process = before is InstanceState.FAILED or (before is InstanceState.RESTARTING and not self._ending)
        self.state = InstanceState.STOPPED if has_no_process else InstanceState.DRAINING
        self.reason = reason
        if has_no_process:
            self.deadline = None
            return []
        if before is InstanceState.READY:
            self._ending = False
            self.deadline = now + seconds
            return [Effect.DRAIN]
        return self._terminate(now)

    def _terminate(self, now: float) -> list[Effect]:
        self._ending = True
        self.deadline = now + self._policy.exit_seconds
        return [Effect.TERMINATE]

    # ------------------------------------------------------------------------------------------------------- deadlines

    def _tick(self, now: float) -> list[Effect]:
        if self._ending:
            return self._kill(self._why)
        effects: list[Effect] = []
        match self.state:
            case InstanceState.RESTARTING:
                self.num_restarts += 1
                effects = self._spawn(now)
            case InstanceState.STARTING:
                effects = self._kill(f"it was not ready within {self._policy.ready_timeout_seconds:g} s")
            case InstanceState.READY if self._probing:
                self.state, self.info = InstanceState.RESTARTING, None
                effects = self._kill(f"it did not answer for {self._policy.probe_deadline_seconds:g} s")
            case InstanceState.READY:
                self._probing = True
                self.deadline = now + self._policy.probe_deadline_seconds
                effects = [Effect.PROBE]
            case InstanceState.DRAINING:
                effects = self._terminate(now)
            case InstanceState.FAILED | InstanceState.STOPPED:
                pass
        return effects

    def _kill(self, why: str) -> list[Effect]:
        if why:
            self._why = self.reason = why
        self._ending = True
        self.deadline = None
        return [Effect.KILL]
