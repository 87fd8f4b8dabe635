"""Health checks as a state: two failures in a row are an illness, one success ends it, and an open breaker with it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.breaker import BreakerState, CircuitBreaker, Verdict
from gateway.routing.health import Health


def test_two_failures_in_a_row_make_it_ill_and_one_success_makes_it_well():
    health = Health()

    assert health.is_well is None
    assert [health.checked(why) for why in ("503", "", "503", "504")] == [False, False, False, True]
    assert (health.is_well, health.is_ill, health.why) == (False, True, "504")
    assert health.checked("505") is False
    assert health.checked("") is True
    assert (health.is_well, health.is_ill, health.why) == (True, False, "")


def test_before_the_first_check_and_after_one_failure_nothing_is_known():
    health = Health()
    health.checked("503")
    assert (health.is_well, health.is_ill) == (None, False)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_it_is_ill_exactly_from_two_failures_to_the_next_success(outcomes):
    health, changes = Health(), 0
    for i, is_good in enumerate(outcomes):
        changes += health.checked("" if is_good else "no")
        ill = any(
            not any(outcomes[at : i + 1]) for at in range(i)
        )  # some run of at least two that reaches to now has no success in it
        assert health.is_ill is ill
    assert changes % 2 == health.is_ill


def test_a_recovery_closes_an_open_breaker_on_probation():
    breaker = CircuitBreaker(2, 10.0)
    for _ in range(2):
        ticket = breaker.admit(0.0)
        assert ticket is not None
        breaker.ended(ticket, Verdict.FAILURE, 0.0)
    assert breaker.state(1.0) is BreakerState.OPEN

    breaker.recovered()
    assert breaker.state(1.0) is BreakerState.CLOSED
    ticket = breaker.admit(1.0)
    assert ticket is not None
    breaker.ended(ticket, Verdict.FAILURE, 1.0)
    assert breaker.state(1.0) is BreakerState.OPEN


def test_a_recovery_of_a_closed_breaker_changes_nothing():
    breaker = CircuitBreaker(3, 10.0)
    ticket = breaker.admit(0.0)
    assert ticket is not None
    breaker.ended(ticket, Verdict.FAILURE, 0.0)
    breaker.recovered()
    assert breaker.num_failures == 1


def test_whoever_was_let_in_before_a_recovery_has_no_say_any_more():
    breaker = CircuitBreaker(1, 10.0)
    slow, first = breaker.admit(0.0), breaker.admit(0.0)
    assert slow is not None
    assert first is not None
    breaker.ended(first, Verdict.FAILURE, 0.0)
    breaker.recovered()
    breaker.ended(slow, Verdict.FAILURE, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
