"""The circuit breaker as a state machine: a model in plain words against it, and what each rule is for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.breaker import BreakerState, CircuitBreaker, Verdict


def opened(max_failures: int = 2, open_seconds: float = 10.0) -> CircuitBreaker:
    breaker = CircuitBreaker(max_failures, open_seconds)
    for _ in range(max_failures):
        run(breaker, Verdict.FAILURE)
    assert breaker.state(0.0) is BreakerState.OPEN
    return breaker


def run(breaker: CircuitBreaker, verdict: Verdict, now: float = 0.0) -> None:
    ticket = breaker.admit(now)
    assert ticket is not None
    breaker.ended(ticket, verdict, now)


def test_it_opens_after_failures_in_a_row_and_says_how_long_to_wait():
    breaker = opened()

    assert breaker.admit(4.0) is None
    assert breaker.wait_seconds(4.0) == 6.0


def test_a_success_in_between_starts_the_count_anew():
    breaker = CircuitBreaker(2, 10.0)
    for verdict in (Verdict.FAILURE, Verdict.SUCCESS, Verdict.FAILURE):
        run(breaker, verdict)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_neither_a_busy_target_nor_an_abort_nor_a_refusal_counts():
    breaker = CircuitBreaker(1, 10.0)
    for verdict in (Verdict.ALIVE, Verdict.NONE) * 10:
        run(breaker, verdict)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_half_open_lets_one_through_and_its_first_answer_closes():
    breaker = opened()
    trial = breaker.admit(10.0)

    assert trial is not None
    assert breaker.admit(10.0) is None
    assert breaker.wait_seconds(10.0) > 0
    breaker.answered(trial)
    assert breaker.state(10.0) is BreakerState.CLOSED
    assert breaker.admit(10.0) is not None


def test_a_trial_that_breaks_after_its_first_answer_opens_again_at_once():
    breaker = opened(max_failures=5)
    trial = breaker.admit(10.0)
    assert trial is not None
    breaker.answered(trial)
    breaker.ended(trial, Verdict.FAILURE, 11.0)

    assert breaker.state(11.0) is BreakerState.OPEN


def test_a_trial_that_fails_opens_again_and_one_that_is_aborted_lets_the_next_try():
    breaker = opened()
    run(breaker, Verdict.NONE, 10.0)
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    run(breaker, Verdict.FAILURE, 10.0)
    assert breaker.state(19.0) is BreakerState.OPEN


def test_a_429_shows_that_the_target_is_back():
    breaker = opened()
    run(breaker, Verdict.ALIVE, 10.0)
    assert breaker.state(10.0) is BreakerState.CLOSED


def test_whoever_was_let_in_before_it_opened_has_no_say_any_more():
    breaker = CircuitBreaker(1, 10.0)
    late = [breaker.admit(0.0) for _ in range(3)]
    run(breaker, Verdict.FAILURE)
    for ticket, verdict in zip(late, (Verdict.SUCCESS, Verdict.FAILURE, Verdict.ALIVE), strict=True):
        assert ticket is not None
        breaker.ended(ticket, verdict, 5.0)

    assert breaker.state(9.0) is BreakerState.OPEN
    assert breaker.state(10.0) is BreakerState.HALF_OPEN  # nor was it kept open for longer


def test_zero_failures_means_never():
    breaker = CircuitBreaker(0, 10.0)
    for _ in range(50):
        run(breaker, Verdict.FAILURE)
    assert breaker.state(0.0) is BreakerState.CLOSED


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 10.0])),
        st.tuples(st.just("answered"), st.integers(0, 3)),
        st.tuples(st.sampled_from(list(Verdict)), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(EVENTS, st.integers(1, 4))
def test_in_any_order_of_events_it_is_never_stuck_and_never_lets_a_herd_at_an_ill_target(events, max_failures):
    breaker, now, running, trials = CircuitBreaker(max_failures, 10.0), 0.0, [], 0
    for event, value in events:
        state = breaker.state(now)
        if event == "wait":
            now += value
        elif event == "admit":
            wait, ticket = breaker.wait_seconds(now), breaker.admit(now)
            assert (ticket is None) is (wait > 0)
            assert state is not BreakerState.OPEN or ticket is None
            assert state is not BreakerState.CLOSED or ticket is not None
            if ticket is not None:
                running.append(ticket)
        elif running:
            ticket = running[value % len(running)]
            if event == "answered":
                breaker.answered(ticket)
                continue
            running.remove(ticket)
            failures = breaker.num_failures
            breaker.ended(ticket, event, now)
            if event in (Verdict.NONE, Verdict.ALIVE) and not ticket.is_trial:
                assert (breaker.state(now), breaker.num_failures) == (state, failures)
        if breaker.state(now) is BreakerState.HALF_OPEN:
            trials = sum(ticket.is_trial and ticket.period == breaker._period for ticket in running)
            assert trials <= 1
            assert (trials == 1) is (breaker.wait_seconds(now) > 0)
    for ticket in running:  # all end: whatever its state, it is closed again by one good answer
        breaker.ended(ticket, Verdict.NONE, now)
    run(breaker, Verdict.SUCCESS, now + 10.0)
    assert breaker.state(now + 10.0) is BreakerState.CLOSED
