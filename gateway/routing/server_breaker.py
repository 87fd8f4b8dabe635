"""The breaker of one of several servers behind a target: `routing.breaker` with a clock, told of errors.

Knows no servers and does nothing but count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.core.errors import GatewayError
from gateway.routing.breaker import BreakerState, CircuitBreaker, Ticket, Verdict
from gateway.routing.retry import failure_of


class ServerBreaker:
    """`admit` a request, and tell its visit how it went."""

    def __init__(self, max_failures: int, open_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._breaker = CircuitBreaker(max_failures, open_seconds)
        self._clock = clock
        self.last_failure = ""

    @property
    def state(self) -> BreakerState:
        return self._breaker.state(self._clock())

    @property
    def num_failures(self) -> int:
        return self._breaker.num_failures

    def wait_seconds(self) -> float:
        return self._breaker.wait_seconds(self._clock())

    def admit(self) -> ServerVisit | None:
        ticket = self._breaker.admit(self._clock())
        return None if ticket is None else ServerVisit(self, ticket)

    def recovered(self) -> None:
        """It is another process: an open breaker closes, on probation."""
        self._breaker.recovered()

    def answered(self, ticket: Ticket) -> None:
        self._breaker.answered(ticket)

    def ended(self, ticket: Ticket, verdict: Verdict, why: str) -> None:
        self._breaker.ended(ticket, verdict, self._clock())
        if verdict is Verdict.FAILURE:
            self.last_failure = why
        elif self._breaker.num_failures == 0:  # not by the late success of one that was let in before the others failed
            self.last_failure = ""


class ServerVisit:
    """One request that was let in. Its first end counts; whoever lets go of it in any case may tell another."""

    def __init__(self, breaker: ServerBreaker, ticket: Ticket) -> None:
        self._breaker = breaker
        self._ticket = ticket
        self._is_over = False

    def answered(self) -> None:
        if not self._is_over:
            self._breaker.answered(self._ticket)

    def ended(self, error: GatewayError | None = None) -> None:
        """What isn't a target's fault isn't a server's: `failure_of` decides for both."""
        if error is None:
            self._end(Verdict.SUCCESS)
        else:
            failure = failure_of(error)
            self._end(failure.verdict, failure.reason.value)

    def left(self) -> None:
        self._end(Verdict.NONE)

    def _end(self, verdict: Verdict, why: str = "") -> None:
        if not self._is_over:
            self._is_over = True
            self._breaker.ended(self._ticket, verdict, why)
