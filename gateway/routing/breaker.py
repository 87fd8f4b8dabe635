"""Whether a target is worth asking, judged by what became of earlier requests. Pure: instants and outcomes in.

Closed: everything goes. Open, after so many failures in a row: nothing goes, for a while. Half-open: one request
goes, and its first answer decides. Whoever was let in before the last change has no say any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_TRIAL_WAIT_SECONDS = 1.0  # what others are told while one request tries whether the target is back


class BreakerState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Verdict(StrEnum):
    """What the end of an attempt says about its target's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    ALIVE = "alive"  # it answered, though not with what was hoped for: 429, a refusal of the request
    NONE = "none"  # nothing: the client left before there was any answer


@dataclass(frozen=True, slots=True)
class Ticket:
    """Given to an attempt that may go; shown again when its end is reported."""

    period: int
    is_trial: bool = False


class CircuitBreaker:
    """Tell it of each attempt: `admit`, then perhaps `answered`, then `ended`."""

    def __init__(self, max_failures: int, open_seconds: float) -> None:
        """Never opens with `max_failures` of 0."""
        self._max_failures = max_failures
        self._open_seconds = open_seconds
        self._num_failures = 0
        self._open_until: float | None = None  # None = closed
        self._trial_runs = False
        self._period = 0  # a change of state begins a new one

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    @property
    def num_failures(self) -> int:
        """In a row."""
        return self._num_failures

    def wait_seconds(self, now: float) -> float:
        """How long to stay away; 0 = `admit` would let one in."""
        if self._open_until is None:
            return 0.0
        if now < self._open_until:
            return self._open_until - now
        return _TRIAL_WAIT_SECONDS if self._trial_runs else 0.0

    def admit(self, now: float) -> Ticket | None:
        """None while nothing may go."""
        if self._open_until is None:
            return Ticket(self._period)
        if self.wait_seconds(now) > 0:
            return None
        self._trial_runs = True
        return Ticket(self._period, is_trial=True)

    def answered(self, ticket: Ticket) -> None:
        """The target took the request. That closes a half-open breaker, on probation: one more failure opens it."""
        if ticket.is_trial and ticket.period == self._period:
            self.recovered()

    def recovered(self) -> None:
        """Others know that the target is back: an open breaker closes early, on probation as after a trial."""
        if self._open_until is not None:
            self._open_until = None
            self._begin_period()
            self._num_failures = self._max_failures - 1

    def ended(self, ticket: Ticket, verdict: Verdict, now: float) -> None:
        """Count the end of an attempt; also of one whose answer had begun."""
        if verdict in (Verdict.SUCCESS, Verdict.ALIVE):
            self.answered(ticket)
        if ticket.period != self._period and not (ticket.is_trial and ticket.period == self._period - 1):
            return
        if ticket.period == self._period and ticket.is_trial:
            self._trial_runs = False  # it ended without an answer
        if verdict is Verdict.SUCCESS:
            self._num_failures = 0
        elif verdict is Verdict.FAILURE:
            self._fail(now)

    def _fail(self, now: float) -> None:
        self._num_failures += 1
        if self._max_failures and self._num_failures >= self._max_failures:
            self._open_until = now + self._open_seconds
            self._begin_period()

    def _begin_period(self) -> None:
        self._period += 1
        self._trial_runs = False
