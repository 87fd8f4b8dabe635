"""Lets requests through to one target: as many at once as it takes, the rest in a bounded queue, none while it is ill.

Knows no HTTP and no target; `routing.breaker` says whether the target is ill by what became of requests,
`routing.health` by the health checks that somebody reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.errors import Overloaded, TargetUnavailable
from gateway.routing.breaker import BreakerState, CircuitBreaker, Ticket, Verdict
from gateway.routing.health import Health
from gateway.settings.schema import Settings, TargetSettings

logger = logging.getLogger(__name__)

_LEVEL = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


@dataclass(frozen=True, slots=True)
class GuardLimits:
    max_concurrent: int | None = None
    max_queued: int = 64
    queue_seconds: float = 30.0
    breaker_failures: int = 5
    breaker_seconds: float = 30.0
    health_path: str | None = None  # None = nobody reports health checks
    health_seconds: float = 10.0


def limits_of(settings: Settings, name: str) -> GuardLimits:
    """Of a target by its name. Who isn't among the targets of the settings looks after itself."""
    for target in settings.targets:
        if target.name == name:
            return _limits(target)
    server = settings.server
    if server.api_base and name == server.name:
        return GuardLimits(server.api_max_concurrent, server.api_max_queued, health_path=server.api_health_path)
    return GuardLimits(breaker_failures=0)


def _limits(target: TargetSettings) -> GuardLimits:
    return GuardLimits(
        target.max_concurrent,
        target.max_queued,
        target.queue_seconds,
        target.breaker_failures,
        target.breaker_seconds,
        target.health_path,
        target.health_seconds,
    )


class TargetGuard:
    """`enter`, then perhaps `answered`, and in any case `leave`."""

    def __init__(self, name: str, limits: GuardLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._limits = limits
        self._clock = clock
        self._breaker = CircuitBreaker(limits.breaker_failures, limits.breaker_seconds)
        self._health = Health()
        self._num_running = 0
        self._queue: deque[asyncio.Future[None]] = deque()  # each is given the place of one that leaves, or turned away
        self.last_failure = ""  # why the last attempt failed; "" once one succeeded

    async def enter(self) -> Ticket:
        """Wait for a place. Raises TargetUnavailable while the target is ill, Overloaded if too many wait."""
        self._check_health()
        limit = self._limits.max_concurrent
        if limit is not None and self._num_running >= limit:
            await self._wait()
        else:
            self._num_running += 1
        ticket = None if self._health.is_ill else self._breaker.admit(self._clock())
        if ticket is None:  # it has fallen ill in the meantime
            self._give_place()
            raise self._unavailable()
        return ticket

    def answered(self, ticket: Ticket) -> None:
        self._breaker.answered(ticket)

    def leave(self, ticket: Ticket, verdict: Verdict, why: str = "") -> None:
        self._breaker.ended(ticket, verdict, self._clock())
        if verdict in (Verdict.SUCCESS, Verdict.FAILURE):
            self.last_failure = why if verdict is Verdict.FAILURE else ""
        self._give_place()

    def checked(self, why: str) -> None:
        """How a health check went, "" = well. One that went well closes an open breaker early."""
        has_changed = self._health.checked(why)
        if not why:
            self._breaker.recovered()
        if has_changed and why:
            logger.warning("upstream %s is ill, nothing is sent there: %s", self._name, why)
            self._turn_away()
        elif has_changed:
            logger.info("upstream %s is well again", self._name)

    def figures(self) -> dict[str, float]:
        """By the names of the metrics."""
        state = self._breaker.state(self._clock())
        found: dict[str, float] = {
            "in_flight": self._num_running,
            "queued": len(self._queue),
            "breaker_state": _LEVEL[state],
        }
        return found if self._health.is_well is None else found | {"healthy": float(self._health.is_well)}

    def health(self) -> dict[str, object]:
        """For /ready."""
        now = self._clock()
        state, wait = self._breaker.state(now), self._breaker.wait_seconds(now)
        return {
            "breaker": state.value,
            "failures": self._breaker.num_failures,
            "last_failure": self.last_failure or None,
            "retry_in_seconds": round(wait, 1) or None,
            "in_flight": self._num_running,
            "queued": len(self._queue),
            "healthy": self._health.is_well,
            "last_check": self._health.why or None,
        }

    # ------------------------------------------------------------------------------------------------------- places

    async def _wait(self) -> None:
        """Until a place is handed over. Counted as running from then on."""
        if len(self._queue) >= self._limits.max_queued:
            raise self._overloaded("no more may wait for it")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_place()  # it came just as we left
            elif place in self._queue:
                self._queue.remove(place)
            if isinstance(error, TimeoutError):
                raise self._overloaded(f"none of them ended within {self._limits.queue_seconds:g} s") from None
            raise

    def _turn_away(self) -> None:
        """Whoever waits: there may be another place to ask, and here nobody knows when those who run will end."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_exception(self._unavailable())

    def _give_place(self) -> None:
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._num_running -= 1

    # ------------------------------------------------------------------------------------------------------ refusals

    def _check_health(self) -> None:
        if self._health.is_ill or self._breaker.wait_seconds(self._clock()) > 0:
            raise self._unavailable()

    def _unavailable(self) -> TargetUnavailable:
        if self._health.is_ill:
            wait = max(1.0, self._limits.health_seconds)
            return TargetUnavailable(
                f"Upstream {self._name!r} is ill: {self._health.why}. It is checked again every {wait:.0f} s.",
                retry_after_seconds=wait,
            )
        wait = max(1.0, self._breaker.wait_seconds(self._clock()))
        why = f" ({self.last_failure})" if self.last_failure else ""
        return TargetUnavailable(
            f"Upstream {self._name!r} has failed several times in a row{why}. It is tried again in {wait:.0f} s.",
            retry_after_seconds=wait,
        )

    def _overloaded(self, what: str) -> Overloaded:
        limit = self._limits.max_concurrent
        message = f"Upstream {self._name!r} is answering {limit} requests, its limit, and {what}. Try again."
        return Overloaded(message, retry_after_seconds=1)
