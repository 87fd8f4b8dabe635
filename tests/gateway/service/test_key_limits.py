"""The limits of a key as a machine over time: never more than it may, never stuck, nothing lost."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import BudgetExhausted, GatewayError, KeyForbids, RateLimited
from gateway.core.types import CacheMode
from gateway.service.key_limits import MINUTE, KeyLimits, Window, check_allowed, may_use, tokens_needed
from gateway.settings.schema import KeySettings


class World:
    """A clock and a calendar that are moved by hand."""

    def __init__(self, day="2026-01-30"):
        self.now = 1000.0
        self.today = datetime.fromisoformat(day).replace(tzinfo=UTC)
        self.limits = KeyLimits(lambda: self.now, lambda: self.today)

    def later(self, seconds):
        self.now += seconds
        self.today += timedelta(seconds=seconds)


def key(**limits):
    return KeySettings(key="sk-k", name="k", **limits)


def test_requests_of_any_minute_are_limited_and_come_back():
    world, limited = World(), key(requests_per_minute=2)
    for _ in range(2):
        world.limits.admit(limited, 1).done(tokens=1, cost_usd=None)
    with pytest.raises(RateLimited, match="2 requests per minute") as raised:
        world.limits.admit(limited, 1)
    assert 59 <= raised.value.retry_after_seconds <= 61
    world.later(raised.value.retry_after_seconds)
    world.limits.admit(limited, 1)


def test_a_refused_request_counts_as_none():
    world, limited = World(), key(requests_per_minute=1)
    world.limits.admit(limited, 1)
    for _ in range(9):
        world.later(6)
        with pytest.raises(RateLimited):
            world.limits.admit(limited, 1)
    world.later(8)
    world.limits.admit(limited, 1)


def test_tokens_of_running_requests_count_and_are_given_back():
    world, limited = World(), key(tokens_per_minute=100)
    first = world.limits.admit(limited, 80)
    with pytest.raises(RateLimited, match="100 tokens per minute"):
        world.limits.admit(limited, 30)
    first.done(tokens=10, cost_usd=None)
    second = world.limits.admit(limited, 90)
    second.done(tokens=500, cost_usd=None)  # the truth may be more than what was thought
    with pytest.raises(RateLimited):
        world.limits.admit(limited, 1)
    world.later(MINUTE + 1)
    world.limits.admit(limited, 100)


def test_a_request_that_may_need_more_than_all_waits_for_all():
    world, limited = World(), key(tokens_per_minute=100)
    small = world.limits.admit(limited, 10)
    with pytest.raises(RateLimited):
        world.limits.admit(limited, 5000)
    small.done(tokens=0, cost_usd=None)
    world.limits.admit(limited, 5000)


def test_requests_at_once():
    world, limited = World(), key(max_concurrent=2)
    first, _ = world.limits.admit(limited, 1), world.limits.admit(limited, 1)
    with pytest.raises(RateLimited, match="2 requests under way") as raised:
        world.limits.admit(limited, 1)
    assert raised.value.retry_after_seconds == 1
    first.done(tokens=1, cost_usd=None)
    first.done(tokens=1, cost_usd=None)  # told twice, counted once
    world.limits.admit(limited, 1)
    with pytest.raises(RateLimited):
        world.limits.admit(limited, 1)


@pytest.mark.parametrize(
    ("period", "seconds"),
    [("day", 24 * 3600), ("week", 3 * 24 * 3600), ("month", 2 * 24 * 3600)],  # from Friday, 30 January
)
def test_a_budget_begins_anew_with_its_period(period, seconds):
    world, limited = World(), key(budget_usd=1, budget_period=period)
    world.limits.admit(limited, 1).done(tokens=1, cost_usd=1.5)
    with pytest.raises(BudgetExhausted, match="budget of 1 USD") as raised:
        world.limits.admit(limited, 1)
    assert raised.value.retry_after_seconds == seconds
    world.later(seconds)
    world.limits.admit(limited, 1)
    assert world.limits.spent_usd(limited) == 0


def test_a_total_budget_never_begins_anew():
    world, limited = World(), key(budget_usd=1, budget_period="total")
    world.limits.admit(limited, 1).done(tokens=1, cost_usd=1)
    world.later(400 * 24 * 3600)
    with pytest.raises(BudgetExhausted) as raised:
        world.limits.admit(limited, 1)
    assert raised.value.retry_after_seconds is None


def test_a_budget_of_nothing_allows_nothing():
    with pytest.raises(BudgetExhausted):
        World().limits.admit(key(budget_usd=0), 1)


def test_what_was_used_stays_used_when_the_limits_change():
    world = World()
    world.limits.admit(key(requests_per_minute=5), 1)
    with pytest.raises(RateLimited):
        world.limits.admit(key(requests_per_minute=1), 1)
    world.limits.admit(key(requests_per_minute=6), 1)


def test_keys_have_limits_of_their_own():
    world = World()
    world.limits.admit(key(requests_per_minute=1), 1)
    world.limits.admit(KeySettings(key="sk-2", name="other", requests_per_minute=1), 1)


def test_headers_say_what_is_left():
    world, limited = World(), key(requests_per_minute=3, tokens_per_minute=100)
    permit = world.limits.admit(limited, 40)
    assert world.limits.headers(limited) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "61s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "60",
        "x-ratelimit-reset-tokens": "0s",
    }
    permit.done(tokens=15, cost_usd=None)
    assert world.limits.headers(limited)["x-ratelimit-remaining-tokens"] == "85"
    assert world.limits.headers(key()) == {}


@pytest.mark.parametrize(
    ("patterns", "model", "allowed"),
    [((), "any", True), (("a*",), "abc", True), (("a*",), "b", False), (("a", "b?"), "b1", True), (("A",), "a", False)],
)
def test_models_by_pattern(patterns, model, allowed):
    assert may_use(key(models=patterns), model) is allowed


def test_a_refusal_names_what_is_allowed():
    with pytest.raises(KeyForbids, match=r"'gpt'.*It may use: small, tiny-\*"):
        check_allowed(key(models=("small", "tiny-*")), "gpt", CacheMode.MERGED)
    with pytest.raises(KeyForbids, match=r"mode merged.*It may use: split"):
        check_allowed(key(modes=(CacheMode.SPLIT,)), "m", CacheMode.MERGED)
    check_allowed(key(modes=(CacheMode.SPLIT,)), "m", CacheMode.SPLIT)


def test_what_a_request_may_need():
    assert tokens_needed(400, (None, True, -1, "5", 30, 99)) == 130
    assert tokens_needed(400, ()) == 100


# ------------------------------------------------------------------------------------------------------- properties

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 50)), max_size=60)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(STEPS)
def test_a_window_never_forgets_too_early_nor_keeps_much_longer(steps):
    window, now, said = Window(), 0.0, []
    for wait, amount in steps:
        now += wait
        window.add(amount, now)
        said.append((now, amount))
        total = window.total(now)
        assert total >= sum(amount for at, amount in said if now - at < MINUTE)
        assert total <= sum(amount for at, amount in said if now - at <= MINUTE + 1)
        assert len(window._parts) <= MINUTE + 2
        until = window.seconds_until(total / 2, now)
        assert window.seconds_until(total / 2, now) == until
        assert 0 <= until <= MINUTE + 1


@settings(derandomize=True, max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 5))
def test_a_wait_that_was_said_is_enough(steps, limit):
    world, limited, admitted = World(), key(requests_per_minute=limit), []
    for wait, _ in steps:
        world.later(wait)
        try:
            world.limits.admit(limited, 1).done(tokens=1, cost_usd=None)
        except RateLimited as error:
            world.later(error.retry_after_seconds or 0)
            world.limits.admit(limited, 1).done(tokens=1, cost_usd=None)
        admitted.append(world.now)
        assert sum(world.now - at < MINUTE for at in admitted) <= limit


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 60)),
        st.tuples(st.just("done"), st.integers(0, 60)),
        st.tuples(st.just("wait"), st.floats(0, 90)),
    ),
    max_size=80,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(OPERATIONS)
def test_nothing_is_lost_whatever_happens(operations):
    """Places and tokens in use are exactly those of the requests under way; when none is, an empty minute frees all."""
    world, limited = World(), key(max_concurrent=3, tokens_per_minute=100, requests_per_minute=10)
    running = []
    for operation, number in operations:
        if operation == "wait":
            world.later(number)
        elif operation == "admit":
            with suppress(GatewayError):
                running.append(world.limits.admit(limited, number))
        elif running:
            running.pop(number % len(running)).done(tokens=number, cost_usd=0.01)
        state = world.limits._states["k"] if world.limits._states else None
        if state is not None:
            assert state.num_running == len(running) <= 3
            assert state.taken == sum(permit.tokens for permit in running) <= 100
    for permit in running:
        permit.done(tokens=0, cost_usd=None)
    world.later(MINUTE + 1)
    world.limits.admit(limited, 100)
