"""When engine variants start and stop, as one state machine: events in, effects out. Knows no process and no clock.

A variant is a whole set of instances for one mode with another KV dtype than the main engine's. Each goes
stopped -> starting -> ready -> stopping -> stopped. Who asks for one is answered exactly once, by a `Grant` or a
`Refuse`; a granted one holds the variant until its `Leave`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.upstreams.engine.variant_events import (
    Ask,
    Broke,
    CameUp,
    Effect,
    Event,
    Grant,
    Leave,
    Refuse,
    Shutdown,
    StartVariant,
    Stopped,
    StopVariant,
    Tick,
    VariantKey,
)

BUSY_RETRY_SECONDS = 5.0
SOON_RETRY_SECONDS = 1.0
SHUTTING_DOWN = "the gateway is shutting down"


class VariantState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class VariantPolicy:
    max_variants: int = 1  # that have processes at once
    idle_seconds: float = 300.0
    ready_timeout_seconds: float = 300.0  # longest start, and longest wait of a request for one
    first_back_off_seconds: float = 5.0  # after a failure; doubled with each one that follows it
    longest_back_off_seconds: float = 300.0


@dataclass(slots=True)
class _Variant:
    key: VariantKey
    state: VariantState = VariantState.STOPPED
    num_requests: int = 0
    idle_since: float = 0.0  # since when nobody uses it
    start_deadline: float = 0.0
    broken: str = ""  # why it can't be used; it ends with its last request
    last_failure: str = ""
    num_failures: int = 0  # without a start that succeeded in between
    not_before: float = 0.0  # end of the back-off

    @property
    def is_up(self) -> bool:
        return self.state in (VariantState.STARTING, VariantState.READY)

    @property
    def is_idle(self) -> bool:
        return self.state is VariantState.READY and self.num_requests == 0


@dataclass(slots=True)
class _Waiter:
    key: VariantKey
    deadline: float


@dataclass(frozen=True, slots=True)
class VariantSnapshot:
    key: VariantKey
    state: VariantState
    reason: str  # of the last failure; empty while it serves
    num_requests: int
    num_waiting: int


@dataclass(slots=True)
class VariantMachine:
    """Decides for all variants together. `deadline()` is when it wants a `Tick`.

    Those that are up, and those that are promised to a waiter and start as soon as others have ended, are together
    never more than `max_variants`; so a place that was promised always comes.
    """

    keys: Iterable[VariantKey]
    policy: VariantPolicy
    _variants: dict[VariantKey, _Variant] = field(init=False)
    _waiters: dict[int, _Waiter] = field(init=False, default_factory=dict)  # in the order in which they came
    _leases: dict[int, VariantKey] = field(init=False, default_factory=dict)
    _closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._variants = {key: _Variant(key) for key in self.keys}

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Ask(waiter=waiter, key=key):
                effects = self._ask(waiter, self._variants[key], now)
            case Leave(waiter=waiter):
                effects = self._leave(waiter, now)
            case CameUp(key=key):
                effects = self._came_up(self._variants[key], now)
            case Broke(key=key, reason=reason):
                effects = self._broke(self._variants[key], reason, now)
            case Stopped(key=key):
                effects = self._stopped(self._variants[key], now)
            case Shutdown():
                effects = self._shut_down()
            case Tick():
                effects = self._tick(now)
        return effects

    def deadline(self) -> float | None:
        times = [waiter.deadline for waiter in self._waiters.values()]
        for variant in self._variants.values():
            if variant.state is VariantState.STARTING:
                times.append(variant.start_deadline)
            elif variant.is_idle:
                times.append(variant.idle_since + self.policy.idle_seconds)
        return min(times, default=None)

    def snapshots(self) -> list[VariantSnapshot]:
        return [
            VariantSnapshot(
                variant.key,
                variant.state,
                variant.broken or variant.last_failure,
                variant.num_requests,
                sum(1 for _ in self._waiters_for(variant)),
            )
            for variant in self._variants.values()
        ]

    # ----------------------------------------------------------------------------------------------- ask, wait, leave

    def _ask(self, waiter: int, variant: _Variant, now: float) -> list[Effect]:
        refusal = self._refusal(waiter, variant, now)
        if refusal is not None:
            return [refusal]
        if variant.state is VariantState.READY:
            return [self._grant(waiter, variant)]
        effects: list[Effect] = []
        if not (variant.is_up or self._is_promised(variant)):
            evicted = self._make_room(variant)
            if evicted is None:
                return [self._no_place(waiter, variant)]
            effects += evicted
        self._waiters[waiter] = _Waiter(variant.key, now + self.policy.ready_timeout_seconds)
        return effects + self._start_promised(now)

    def _refusal(self, waiter: int, variant: _Variant, now: float) -> Refuse | None:
        if self._closed:
            return Refuse(waiter, SHUTTING_DOWN)
        if variant.broken:
            return Refuse(waiter, variant.broken, retry_after_seconds=SOON_RETRY_SECONDS)
        if now < variant.not_before:
            wait = variant.not_before - now
            reason = f"{variant.last_failure} (the next try is possible in {wait:.0f} s)"
            return Refuse(waiter, reason, retry_after_seconds=wait)
        return None

    def _make_room(self, variant: _Variant) -> list[Effect] | None:
        """Nothing to do, or the end of the variant that was idle for longest; None if all places are in use."""
        taken = sum(1 for other in self._variants.values() if other.is_up or self._is_promised(other))
        if taken < self.policy.max_variants:
            return []
        idle = [other for other in self._variants.values() if other.is_idle]
        if not idle:
            return None
        oldest = min(idle, key=lambda other: other.idle_since)
        return [self._stop(oldest, f"making room for {variant.key}")]

    def _no_place(self, waiter: int, variant: _Variant) -> Refuse:
        others = ", ".join(str(other.key) for other in self._variants.values() if other.is_up) or "others"
        limit = self.policy.max_variants
        return Refuse(
            waiter,
            f"{limit} engine variant{'s' if limit > 1 else ''} may run at once (engine.max_variants), and {others} "
            f"can't be stopped for {variant.key} while in use",
            busy=True,
            retry_after_seconds=BUSY_RETRY_SECONDS,
        )

    def _grant(self, waiter: int, variant: _Variant) -> Grant:
        variant.num_requests += 1
        self._leases[waiter] = variant.key
        return Grant(waiter, variant.key)

    def _leave(self, waiter: int, now: float) -> list[Effect]:
        self._waiters.pop(waiter, None)  # the start goes on, and ends up idle
        key = self._leases.pop(waiter, None)
        if key is None:
            return []
        variant = self._variants[key]
        variant.num_requests -= 1
        variant.idle_since = now
        if variant.broken and variant.is_idle:
            return [self._stop(variant, variant.broken)]
        return []

    def _waiters_for(self, variant: _Variant) -> Iterator[int]:
        return (number for number, waiter in self._waiters.items() if waiter.key == variant.key)

    def _is_promised(self, variant: _Variant) -> bool:
        """It starts once others, or its own last processes, have ended."""
        return not variant.is_up and any(self._waiters_for(variant))

    # -------------------------------------------------------------------------------------------------- start and stop

    def _start_promised(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in dict.fromkeys(waiter.key for waiter in self._waiters.values()):
            variant = self._variants[key]
            alive = sum(1 for other in self._variants.values() if other.state is not VariantState.STOPPED)
            if variant.state is VariantState.STOPPED and alive < self.policy.max_variants:
                variant.state = VariantState.STARTING
                variant.start_deadline = now + self.policy.ready_timeout_seconds
                effects.append(StartVariant(key))
        return effects

    def _came_up(self, variant: _Variant, now: float) -> list[Effect]:
        if variant.state is not VariantState.STARTING:
            return []
        variant.state = VariantState.READY
        variant.idle_since = now
        variant.num_failures = 0
        variant.last_failure = ""
        granted = list(self._waiters_for(variant))
        for waiter in granted:
            del self._waiters[waiter]
        return [self._grant(waiter, variant) for waiter in granted]

    def _broke(self, variant: _Variant, reason: str, now: float) -> list[Effect]:
        """Those who use it may still get their answers: a decode side can finish what it has."""
        if not variant.is_up or variant.broken:
            return []
        back_off = self.policy.first_back_off_seconds * 2**variant.num_failures
        back_off = min(back_off, self.policy.longest_back_off_seconds)
        variant.num_failures = min(variant.num_failures + 1, 32)
        variant.not_before = now + back_off
        variant.broken = variant.last_failure = reason
        effects: list[Effect] = []
        for waiter in list(self._waiters_for(variant)):
            del self._waiters[waiter]
            effects.append(Refuse(waiter, reason, retry_after_seconds=back_off))
        return [*effects, self._stop(variant, reason)] if variant.num_requests == 0 else effects

    def _stop(self, variant: _Variant, reason: str) -> StopVariant:
        variant.state = VariantState.STOPPING
        variant.broken = ""
        return StopVariant(variant.key, reason)

    def _stopped(self, variant: _Variant, now: float) -> list[Effect]:
        if variant.state is not VariantState.STOPPING:
            return []
        variant.state = VariantState.STOPPED
        return self._start_promised(now)

    def _shut_down(self) -> list[Effect]:
        self._closed = True
        effects: list[Effect] = [Refuse(waiter, SHUTTING_DOWN) for waiter in self._waiters]
        self._waiters.clear()
        return effects + [self._stop(variant, SHUTTING_DOWN) for variant in self._variants.values() if variant.is_up]

    # ------------------------------------------------------------------------------------------------------- deadlines

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        limit = f"it was not ready within {self.policy.ready_timeout_seconds:g} s"
        for variant in self._variants.values():
            if variant.state is VariantState.STARTING and now >= variant.start_deadline:
                effects += self._broke(variant, limit, now)
            elif variant.is_idle and now >= variant.idle_since + self.policy.idle_seconds:
                effects.append(self._stop(variant, f"no request for {self.policy.idle_seconds:g} s"))
        for number in [number for number, waiter in self._waiters.items() if now >= waiter.deadline]:
            del self._waiters[number]
            effects.append(Refuse(number, limit, retry_after_seconds=SOON_RETRY_SECONDS))
        return effects
