"""What a client key may do: how often, how much at once, which models and modes, at what cost. No I/O; told the time.

Limits by the minute hold for any 60 seconds, not for clock minutes. A request takes the tokens that it may need when
it is admitted, and when it ends those that it took: streams that are under way count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

from gateway.core.errors import BudgetExhausted, KeyForbids, RateLimited
from gateway.core.types import CacheMode
from gateway.settings.schema import KeySettings

MINUTE = 60.0
_PART = 1.0  # seconds of a window that are counted together, as if they all came at their end
_PERIODS = {"day": "today's", "week": "this week's", "month": "this month's", "total": "the whole"}


class Window:
    """The sum of amounts within any 60 seconds. Never forgets one too early; nor grows with their number."""

    def __init__(self) -> None:
        self._parts: deque[list[float]] = deque()  # [end of the part, amount], oldest first
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        end = (math.floor(now / _PART) + 1) * _PART
        if self._parts and self._parts[-1][0] >= end:
            self._parts[-1][1] += amount
        else:
            self._parts.append([end, amount])
        self._sum += amount

    def total(self, now: float) -> float:
        while self._parts and self._parts[0][0] + MINUTE <= now:
            self._sum -= self._parts.popleft()[1]
        return self._sum if self._parts else 0.0

    def seconds_until(self, most: float, now: float) -> float:
        """How long until no more than `most` is left, if nothing is added."""
        left = self.total(now)
        for end, amount in self._parts:
            if left <= most:
                return 0.0
            left -= amount
            if left <= most:
                return max(0.0, end + MINUTE - now)
        return 0.0


@dataclass(slots=True)
class _State:
    """What one key has used. Outlives a change of its limits."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    num_running: int = 0
    taken: float = 0  # tokens that running requests may need
    spent_usd: float = 0.0
    period: str = ""


def is_limited(key: KeySettings) -> bool:
    limits = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent, key.budget_usd)
    return any(limit is not None for limit in limits)


class Permit:
    """One admitted request. `done` once, with what it took."""

    def __init__(self, limits: KeyLimits, key: KeySettings, tokens: int) -> None:
        self.key = key
        self.tokens = tokens
        self._limits = limits
        self._is_done = False

    def done(self, *, tokens: int, cost_usd: float | None) -> None:
        if not self._is_done:
            self._is_done = True
            self._limits.release(self, tokens, cost_usd or 0.0)


class KeyLimits:
    """Of all keys, by name. Kept when the settings are read again: limits change, what was used stays used."""

    def __init__(self, clock: Callable[[], float], today: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._today = today
        self._states: dict[str, _State] = {}

    def admit(self, key: KeySettings, tokens: int) -> Permit:
        """Take a place. `tokens` is what the request may need. Raises RateLimited or BudgetExhausted."""
        state, now = self._state(key), self._clock()
        self._check_budget(key, state)
        _check_running(key, state)
        _check_requests(key, state, now)
        if key.tokens_per_minute is not None:
            tokens = min(tokens, key.tokens_per_minute)  # one that may need more than all waits for all
        _check_tokens(key, state, tokens, now)
        state.requests.add(1, now)
        state.num_running += 1
        state.taken += tokens
        return Permit(self, key, tokens)

    def release(self, permit: Permit, tokens: int, cost_usd: float) -> None:
        state = self._state(permit.key)
        state.num_running -= 1
        state.taken -= permit.tokens
        state.tokens.add(max(0, tokens), self._clock())
        state.spent_usd += cost_usd

    def headers(self, key: KeySettings) -> dict[str, str]:
        """What is left, by the names that OpenAI's clients read."""
        state, now = self._state(key), self._clock()
        found: dict[str, str] = {}
        for name, limit, window, taken in (
            ("requests", key.requests_per_minute, state.requests, 0.0),
            ("tokens", key.tokens_per_minute, state.tokens, state.taken),
        ):
            if limit is not None:
                found[f"x-ratelimit-limit-{name}"] = str(limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(limit - window.total(now) - taken)))
                found[f"x-ratelimit-reset-{name}"] = f"{math.ceil(window.seconds_until(0, now))}s"
        return found

    def spent_usd(self, key: KeySettings) -> float:
        return self._state(key).spent_usd

    def _state(self, key: KeySettings) -> _State:
        state = self._states.setdefault(key.name, _State())
        period = _period(key, self._today())
        if state.period != period:
            state.period, state.spent_usd = period, 0.0
        return state

    def _check_budget(self, key: KeySettings, state: _State) -> None:
        if key.budget_usd is None or state.spent_usd < key.budget_usd:
            return
        wait = _seconds_left(key, self._today())
        when = "" if wait is None else f" It begins anew in {_duration(wait)}."
        raise BudgetExhausted(
            f"Key {key.name!r} has spent {_PERIODS[key.budget_period]} budget of {key.budget_usd:g} USD.{when}",
            retry_after_seconds=wait,
        )


def check_allowed(key: KeySettings, model: str, mode: CacheMode) -> None:
    """Raises KeyForbids, which names what the key may use."""
    if not may_use(key, model):
        allowed = ", ".join(key.models)
        raise KeyForbids(f"Key {key.name!r} may not use model {model[:100]!r}. It may use: {allowed}.", param="model")
    if not may_use_mode(key, mode):
        allowed = ", ".join(key.modes)
        raise KeyForbids(f"Key {key.name!r} may not use mode {mode}. It may use: {allowed}.", param="mode")


def may_use(key: KeySettings, model: str) -> bool:
    return not key.models or any(fnmatchcase(model, pattern) for pattern in key.models)


def may_use_mode(key: KeySettings, mode: CacheMode) -> bool:
    return not key.modes or mode in key.modes


def _check_running(key: KeySettings, state: _State) -> None:
    if key.max_concurrent is not None and state.num_running >= key.max_concurrent:
        raise RateLimited(
            f"Key {key.name!r} has {state.num_running} requests under way, and its limit is {key.max_concurrent}. "
            "Try again when one has ended.",
            retry_after_seconds=1,
        )


def _check_requests(key: KeySettings, state: _State, now: float) -> None:
    limit = key.requests_per_minute
    if limit is not None and state.requests.total(now) + 1 > limit:
        wait = state.requests.seconds_until(limit - 1, now)
        raise RateLimited(_per_minute(key, "requests", limit, wait), retry_after_seconds=wait)


def _check_tokens(key: KeySettings, state: _State, tokens: int, now: float) -> None:
    limit = key.tokens_per_minute
    if limit is None or state.tokens.total(now) + state.taken + tokens <= limit:
        return
    room = limit - tokens - state.taken
    wait = state.tokens.seconds_until(max(0.0, room), now)
    raise RateLimited(_per_minute(key, "tokens", limit, wait), retry_after_seconds=max(1.0, wait))


def _per_minute(key: KeySettings, what: str, limit: int, wait: float) -> str:
    return (
        f"Key {key.name!r} has used its {limit} {what} per minute, requests under way included. "
        f"Try again in {max(1, math.ceil(wait))} s."
    )


def _period(key: KeySettings, today: datetime) -> str:
    match key.budget_period:
        case "day":
            return today.strftime("%Y-%m-%d")
        case "week":
            return today.strftime("%G-W%V")
        case "month":
            return today.strftime("%Y-%m")
        case "total":
            return "total"


def _seconds_left(key: KeySettings, today: datetime) -> float | None:
    """Until the budget begins anew; None = never."""
    midnight = today.replace(hour=0, minute=0, second=0, microsecond=0)
    match key.budget_period:
        case "total":
            return None
        case "day":
            return (midnight + timedelta(days=1) - today).total_seconds()
        case "week":
            return (midnight + timedelta(days=7 - today.weekday()) - today).total_seconds()
        case "month":
            return ((midnight.replace(day=1) + timedelta(days=32)).replace(day=1) - today).total_seconds()


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"


def tokens_needed(num_bytes: int, limits: Sequence[object]) -> int:
    """A guess before anything is known: a token for four bytes of the body, and the longest answer asked for."""
    answer = next(
        (limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0), 0
    )
    return num_bytes // 4 + answer
