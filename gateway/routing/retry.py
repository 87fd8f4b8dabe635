"""Whether a request that failed before its first token is sent again, where and when. Pure: failures in, decisions out.

The places that may answer are options, in order of preference. A failure leads to the next one at once; only when
every one was asked is one of them asked again, after a random wait; or, if it is being started again, as soon as it is
back. One deadline and one count hold for them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from gateway.core.errors import (
    GatewayError,
    InternalError,
    ModeUnavailable,
    Overloaded,
    TargetUnavailable,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.routing.breaker import Verdict


class Reach(StrEnum):
    """Where a request may be sent after a failure."""

    NOWHERE = "nowhere"  # it would fail anywhere
    ELSEWHERE = "elsewhere"
    ANYWHERE = "anywhere"


class Reason(StrEnum):
    """Why an attempt failed. A closed set: it labels metrics."""

    UNREACHABLE = "unreachable"
    BROKEN = "broken"  # the connection, before the answer was complete
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"  # not asked at all, or the mode can't be served there
    RESTARTING = "restarting"  # not asked: it died, and is coming back
    REFUSED = "refused"  # the request itself


@dataclass(frozen=True, slots=True)
class Failure:
    reason: Reason
    reach: Reach
    verdict: Verdict
    retry_after_seconds: float | None = None
    was_sent: bool = True  # whether the target was asked


@dataclass(frozen=True, slots=True)
class RetryLimits:
    max_attempts: int = 3  # of one request, over all options
    first_delay_seconds: float = 0.25
    max_delay_seconds: float = 5.0
    deadline_seconds: float = 30.0  # after the first attempt began; none begins later
    max_retry_after_seconds: float = 5.0  # a longer Retry-After is passed on to the client instead


@dataclass(frozen=True, slots=True)
class Again:
    option: int
    delay_seconds: float
    when_back: bool = False  # at once when it is back; `delay_seconds` is the longest wait for that


_BUSY = frozenset({429, 529})
_PASSING = frozenset({502, 503, 504})  # of whoever stands in front of a server that is away


_UNAVAILABLE = Failure(Reason.UNAVAILABLE, Reach.ELSEWHERE, Verdict.NONE, was_sent=False)
_BY_ERROR: dict[type[GatewayError], Failure] = {
    UpstreamTimeout: Failure(Reason.TIMEOUT, Reach.ANYWHERE, Verdict.FAILURE),
    UpstreamGone: Failure(Reason.BROKEN, Reach.ANYWHERE, Verdict.FAILURE),
    Overloaded: Failure(Reason.OVERLOADED, Reach.ELSEWHERE, Verdict.NONE, was_sent=False),
    ModeUnavailable: _UNAVAILABLE,
    TargetUnavailable: _UNAVAILABLE,
    InternalError: Failure(Reason.SERVER_ERROR, Reach.ELSEWHERE, Verdict.FAILURE),
}
_REFUSED = Failure(Reason.REFUSED, Reach.NOWHERE, Verdict.ALIVE)


def failure_of(error: GatewayError) -> Failure:
    """What an error means for further attempts. Whatever isn't known to pass is the request's own fault."""
    if isinstance(error, UpstreamError):
        return _of_status(error)
    if isinstance(error, UpstreamUnreachable):
        reach = Reach.ELSEWHERE if error.for_good else Reach.ANYWHERE
        return Failure(Reason.UNREACHABLE, reach, Verdict.FAILURE)
    if isinstance(error, ModeUnavailable) and error.is_restarting:
        return Failure(Reason.RESTARTING, Reach.ANYWHERE, Verdict.NONE, error.retry_after_seconds, was_sent=False)
    return _BY_ERROR.get(type(error), _REFUSED)


def _of_status(error: UpstreamError) -> Failure:
    """Of an upstream's error answer, or of an error that it told within its answer."""
    wait, status = error.retry_after_seconds, error.status
    if status in _BUSY or (status == 503 and wait is not None):
        reach = Reach.ELSEWHERE if wait is None or error.is_final else Reach.ANYWHERE
        return Failure(Reason.OVERLOADED, reach, Verdict.ALIVE, wait)
    if status < 500:
        return Failure(Reason.REFUSED, Reach.NOWHERE, Verdict.ALIVE)
    again = status in _PASSING and not error.is_final
    return Failure(Reason.SERVER_ERROR, Reach.ANYWHERE if again else Reach.ELSEWHERE, Verdict.FAILURE, wait)


class RetryPlan:
    """The attempts of one request. Tell it of each failure; it says what comes next."""

    def __init__(
        self, num_options: int, limits: RetryLimits, *, started_at: float, random: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._ends_at = started_at + limits.deadline_seconds
        self._random = random
        self._untried = list(range(1, num_options))
        self._ready_at: dict[int, float] = {}  # of options that may be asked again
        self._restarting: set[int] = set()  # of these, those that are down until they are back
        self._num_restarts: dict[int, int] = {}  # that were waited for
        self._num_returns = 0
        self._num_sent = 0

    def failed(self, option: int, failure: Failure, now: float, *, stay: bool = False) -> Again | None:
        """None: give up. With `stay` no other option will do any more."""
        self._num_sent += failure.was_sent
        self._note(option, failure, now)
        if failure.reach is Reach.NOWHERE or self._num_sent >= self._limits.max_attempts or now > self._ends_at:
            return None
        if self._untried and not stay:
            return Again(self._untried.pop(0), 0.0)
        return self._return(option if stay else None, now)

    def unsuitable(self, option: int, now: float) -> Again | None:
        """The option can't be asked this at all."""
        return self.failed(option, _UNAVAILABLE, now)

    def _note(self, option: int, failure: Failure, now: float) -> None:
        self._ready_at.pop(option, None)
        self._restarting.discard(option)
        asked_wait = failure.retry_after_seconds or 0.0
        may_return = failure.reach is Reach.ANYWHERE and asked_wait <= self._limits.max_retry_after_seconds
        if may_return and not self._is_deadly(option, failure):
            self._ready_at[option] = now + asked_wait
            if failure.reason is Reason.RESTARTING:
                self._restarting.add(option)

    def _is_deadly(self, option: int, failure: Failure) -> bool:
        """Whether the request may be what ends it: it broke again after it was waited for."""
        num_restarts = self._num_restarts.get(option, 0)
        if failure.reason is Reason.RESTARTING:
            return num_restarts >= self._limits.max_attempts
        return failure.reason is Reason.BROKEN and num_restarts > 0

    def _return(self, only: int | None, now: float) -> Again | None:
        """To the option that may be asked again first; of several, the one that is preferred."""
        ready = {option: at for option, at in self._ready_at.items() if only in (None, option)}
        if not ready:
            return None
        option = min(ready, key=lambda option: (ready[option], option))
        if option in self._restarting:
            return self._when_back(option, now)
        limits = self._limits
        longest = min(limits.max_delay_seconds, limits.first_delay_seconds * 2.0**self._num_returns)
        at = max(ready[option], now) + self._random() * longest
        if at > self._ends_at:
            return None
        self._num_returns += 1
        return Again(option, at - now)

    def _when_back(self, option: int, now: float) -> Again | None:
        """How long a restart takes is known only roughly; the deadline is what counts."""
        if self._ready_at[option] > self._ends_at:
            return None
        self._num_restarts[option] = self._num_restarts.get(option, 0) + 1
        return Again(option, self._ends_at - now, when_back=True)
