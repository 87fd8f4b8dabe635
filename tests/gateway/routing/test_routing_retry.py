"""What follows a failure before the first token: which errors, where to, when, and when no more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import errors
from gateway.core.errors import UpstreamError
from gateway.routing.breaker import Verdict
from gateway.routing.retry import Again, Failure, Reach, Reason, RetryLimits, RetryPlan, failure_of

LIMITS = RetryLimits(max_attempts=3, first_delay_seconds=1.0, max_delay_seconds=4.0, deadline_seconds=30.0)
BROKEN = failure_of(errors.UpstreamGone("x"))


def plan(num_options: int = 1, limits: RetryLimits = LIMITS, random: float = 1.0) -> RetryPlan:
    return RetryPlan(num_options, limits, started_at=0.0, random=lambda: random)


@pytest.mark.parametrize(
    ("error", "reason", "reach", "verdict"),
    [
        (errors.UpstreamUnreachable("x"), "unreachable", "anywhere", "failure"),
        (errors.UpstreamUnreachable("x", for_good=True), "unreachable", "elsewhere", "failure"),
        (errors.UpstreamGone("x"), "broken", "anywhere", "failure"),
        (errors.UpstreamTimeout("x"), "timeout", "anywhere", "failure"),
        (UpstreamError("x", status=502), "server_error", "anywhere", "failure"),
        (UpstreamError("x", status=503), "server_error", "anywhere", "failure"),
        (UpstreamError("x", status=504), "server_error", "anywhere", "failure"),
        (UpstreamError("x", status=502, is_final=True), "server_error", "elsewhere", "failure"),
        (UpstreamError("x", status=500), "server_error", "elsewhere", "failure"),
        (UpstreamError("x", status=503, retry_after_seconds=2), "overloaded", "anywhere", "alive"),
        (UpstreamError("x", status=429, retry_after_seconds=2), "overloaded", "anywhere", "alive"),
        (UpstreamError("x", status=429), "overloaded", "elsewhere", "alive"),
        (UpstreamError("x", status=529), "overloaded", "elsewhere", "alive"),
        (UpstreamError("x", status=400), "refused", "nowhere", "alive"),
        (UpstreamError("x", status=401), "refused", "nowhere", "alive"),
        (errors.Overloaded("x"), "overloaded", "elsewhere", "none"),
        (errors.ModeUnavailable("x"), "unavailable", "elsewhere", "none"),
        (errors.ModeUnavailable("x", retry_after_seconds=1), "unavailable", "elsewhere", "none"),
        (errors.ModeUnavailable("x", retry_after_seconds=1, is_restarting=True), "restarting", "anywhere", "none"),
        (errors.TargetUnavailable("x"), "unavailable", "elsewhere", "none"),
        (errors.InvalidRequest("x"), "refused", "nowhere", "alive"),
        (errors.ContextLengthExceeded("x"), "refused", "nowhere", "alive"),
        (errors.LoopDetected("x"), "refused", "nowhere", "alive"),
    ],
)
def test_each_error_means_one_thing(error, reason, reach, verdict):
    failure = failure_of(error)
    assert (failure.reason, failure.reach, failure.verdict) == (reason, reach, verdict)


def test_waits_double_up_to_a_ceiling_and_are_drawn_from_all_of_it():
    limits = RetryLimits(max_attempts=9, first_delay_seconds=1.0, max_delay_seconds=4.0, deadline_seconds=100.0)
    for part in (0.0, 0.5, 1.0):
        tries = plan(limits=limits, random=part)
        waits = [again.delay_seconds for _ in range(4) if (again := tries.failed(0, BROKEN, 0.0))]
        assert waits == [part, 2 * part, 4 * part, 4 * part]


def test_another_target_is_asked_at_once_and_the_first_again_only_after_all():
    tries = plan(3, RetryLimits(max_attempts=4, first_delay_seconds=1.0))
    assert tries.failed(0, BROKEN, 0.0) == Again(1, 0.0)
    assert tries.failed(1, BROKEN, 0.5) == Again(2, 0.0)
    assert tries.failed(2, BROKEN, 1.0) == Again(0, 1.0)
    assert tries.failed(0, BROKEN, 2.0) is None  # four attempts


def test_a_429_with_a_short_wait_is_waited_for_and_a_long_one_is_the_client_s():
    short, long = (failure_of(UpstreamError("x", status=429, retry_after_seconds=wait)) for wait in (2.0, 60.0))
    assert plan(random=0.0).failed(0, short, 10.0) == Again(0, 2.0)
    assert plan().failed(0, long, 10.0) is None
    assert plan(2).failed(0, long, 10.0) == Again(1, 0.0)


def test_what_could_not_be_sent_is_no_attempt_but_is_left_for_good():
    tries = plan(3, RetryLimits(max_attempts=2))
    full = failure_of(errors.Overloaded("x"))
    assert tries.failed(0, full, 0.0) == Again(1, 0.0)
    assert tries.failed(1, full, 0.0) == Again(2, 0.0)
    assert tries.failed(2, full, 0.0) is None


def test_no_attempt_begins_after_the_deadline():
    assert plan().failed(0, BROKEN, 29.5) is None  # the wait would end after it
    assert plan(2).failed(0, BROKEN, 29.5) == Again(1, 0.0)
    assert plan(2).failed(0, BROKEN, 30.5) is None


def test_once_headers_are_out_only_the_same_option_will_do():
    assert plan(2, random=0.0).failed(0, BROKEN, 0.0, stay=True) == Again(0, 0.0)
    assert plan(2).failed(0, failure_of(errors.ModeUnavailable("x")), 0.0, stay=True) is None


def test_an_option_that_can_not_be_asked_is_passed_over():
    tries = plan(3)
    assert tries.failed(0, BROKEN, 0.0) == Again(1, 0.0)
    assert tries.unsuitable(1, 0.0) == Again(2, 0.0)


def restarting(seconds: float = 1.0) -> Failure:
    return failure_of(errors.ModeUnavailable("x", retry_after_seconds=seconds, is_restarting=True))


def test_what_is_being_started_again_is_asked_when_it_is_back_within_the_deadline():
    tries = plan()
    assert tries.failed(0, BROKEN, 1.0) == Again(0, 1.0)
    assert tries.failed(0, restarting(), 2.0) == Again(0, 28.0, when_back=True)


def test_a_restart_that_takes_longer_than_may_be_waited_for_is_the_client_s():
    assert plan().failed(0, restarting(6.0), 1.0) is None
    assert plan().failed(0, restarting(5.0), 26.0) is None  # it would be back after the deadline
    assert plan().failed(0, restarting(5.0), 30.5) is None


def test_another_option_is_asked_before_a_restart_is_waited_for():
    tries = plan(2)
    assert tries.failed(0, restarting(), 0.0) == Again(1, 0.0)
    assert tries.failed(1, failure_of(UpstreamError("x", status=500)), 2.0) == Again(0, 28.0, when_back=True)


def test_a_request_that_may_be_what_ends_an_engine_is_not_sent_a_third_time():
    tries = plan(limits=RetryLimits(max_attempts=9))
    assert tries.failed(0, BROKEN, 0.0)
    assert tries.failed(0, restarting(), 0.0)
    assert tries.failed(0, BROKEN, 0.0) is None


def test_restarts_of_one_request_are_bounded_even_if_each_is_at_once():
    tries = plan()
    waits = [tries.failed(0, restarting(0.0), 0.0) for _ in range(4)]
    assert [again is not None for again in waits] == [True, True, True, False]


FAILURES = st.builds(
    Failure,
    st.sampled_from(list(Reason)),
    st.sampled_from(list(Reach)),
    st.sampled_from(list(Verdict)),
    st.one_of(st.none(), st.floats(0, 100)),
    st.booleans(),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.tuples(FAILURES, st.floats(0, 20)), max_size=20))
def test_attempts_and_time_are_bounded_whatever_happens(num_options, max_attempts, steps):
    limits = RetryLimits(max_attempts=max_attempts, deadline_seconds=30.0)
    tries, option, now, num_sent = RetryPlan(num_options, limits, started_at=0.0, random=lambda: 0.7), 0, 0.0, 0
    left: set[int] = set()
    for failure, seconds in steps:
        now += seconds
        num_sent += failure.was_sent
        again = tries.failed(option, failure, now)
        if failure.reach is not Reach.ANYWHERE:
            left.add(option)
        if again is None:
            return
        assert failure.reach is not Reach.NOWHERE
        assert num_sent < max_attempts
        assert again.delay_seconds >= 0
        now += again.delay_seconds
        assert now <= 30.0 + 1e-9
        assert again.option not in left
        if again.option == option and failure.retry_after_seconds is not None:
            assert again.delay_seconds >= failure.retry_after_seconds - 1e-9
        option = again.option
