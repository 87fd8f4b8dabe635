"""The breaker of one server: errors in, and only the first end of a visit counts."""

from __future__ import annotations

import pytest

from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.routing.breaker import BreakerState
from gateway.routing.server_breaker import ServerBreaker, ServerVisit

FAULTS = [UpstreamGone("x"), UpstreamTimeout("x"), UpstreamUnreachable("x"), UpstreamError("x", status=500)]
NO_FAULTS = [
    UpstreamError("x", status=400),
    UpstreamError("x", status=429),
    UpstreamError("x", status=503, retry_after_seconds=3),
    InvalidRequest("x"),
]


def visit(breaker: ServerBreaker) -> ServerVisit:
    found = breaker.admit()
    assert found is not None
    return found


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_a_server_s_own_faults_in_a_row_open_it(error: GatewayError):
    breaker = ServerBreaker(2, 10.0, clock=lambda: 0.0)
    for _ in range(2):
        visit(breaker).ended(error)
    assert (breaker.state, breaker.admit(), breaker.wait_seconds()) == (BreakerState.OPEN, None, 10.0)
    assert breaker.last_failure


@pytest.mark.parametrize("error", NO_FAULTS, ids=repr)
def test_what_is_the_request_s_fault_or_a_busy_server_s_does_not(error: GatewayError):
    breaker = ServerBreaker(1, 10.0, clock=lambda: 0.0)
    for _ in range(9):
        visit(breaker).ended(error)
        visit(breaker).left()
    assert (breaker.state, breaker.last_failure) == (BreakerState.CLOSED, "")


def test_only_the_first_end_of_a_visit_counts():
    breaker = ServerBreaker(2, 10.0, clock=lambda: 0.0)
    one = visit(breaker)
    one.ended(UpstreamGone("x"))
    one.ended(UpstreamGone("x"))
    one.ended()
    one.answered()
    one.left()
    assert breaker.num_failures == 1


def test_a_trial_that_is_left_gives_way_to_the_next():
    now = [0.0]
    breaker = ServerBreaker(1, 10.0, clock=lambda: now[0])
    visit(breaker).ended(UpstreamGone("x"))
    now[0] = 10.0
    trial = visit(breaker)
    assert breaker.admit() is None
    trial.left()
    visit(breaker).ended()
    assert (breaker.state, breaker.last_failure) == (BreakerState.CLOSED, "")


def test_an_old_request_that_ends_well_does_not_hide_why_it_is_open():
    breaker = ServerBreaker(2, 10.0, clock=lambda: 0.0)
    old = visit(breaker)
    for _ in range(2):
        visit(breaker).ended(UpstreamGone("x"))
    old.ended()
    assert (breaker.state, breaker.num_failures, breaker.last_failure) == (BreakerState.OPEN, 2, "broken")
