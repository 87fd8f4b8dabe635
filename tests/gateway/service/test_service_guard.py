"""Places, queue and health of one target, without HTTP."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import Overloaded, TargetUnavailable
from gateway.routing.breaker import Verdict
from gateway.service.guard import GuardLimits, TargetGuard, limits_of
from gateway.settings.schema import ServerSettings, Settings, TargetSettings
from support.waiting import until


def guard(**limits) -> TargetGuard:
    return TargetGuard("up", GuardLimits(**limits))


async def waiting(one: TargetGuard, num: int) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(one.enter()) for _ in range(num)]
    await until(lambda: one.figures()["queued"] >= num, "all are queued")
    return tasks


async def test_places_are_handed_over_in_the_order_of_arrival():
    one = guard(max_concurrent=1)
    ticket = await one.enter()
    first, second = await waiting(one, 2)

    one.leave(ticket, Verdict.SUCCESS)
    one.leave(await first, Verdict.SUCCESS)
    assert not second.done()
    one.leave(await second, Verdict.SUCCESS)
    assert one.figures() == {"in_flight": 0, "queued": 0, "breaker_state": 0}


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    one = guard(max_concurrent=1, max_queued=1)
    await one.enter()
    (task,) = await waiting(one, 1)
    with pytest.raises(Overloaded) as refusal:
        await one.enter()
    assert refusal.value.retry_after_seconds
    task.cancel()


async def test_a_wait_has_an_end():
    one = guard(max_concurrent=1, queue_seconds=0.01)
    ticket = await one.enter()
    with pytest.raises(Overloaded, match="within"):
        await one.enter()
    one.leave(ticket, Verdict.SUCCESS)
    assert one.figures()["in_flight"] == 0


async def test_a_client_that_leaves_the_queue_costs_no_place():
    one = guard(max_concurrent=1)
    ticket = await one.enter()
    gone, stays = await waiting(one, 2)
    gone.cancel()
    one.leave(ticket, Verdict.NONE)  # before the one that leaves has noticed

    one.leave(await stays, Verdict.SUCCESS)
    assert one.figures() == {"in_flight": 0, "queued": 0, "breaker_state": 0}


async def test_a_client_that_leaves_just_as_its_place_comes_gives_it_on():
    one = guard(max_concurrent=1)
    ticket = await one.enter()
    gone, stays = await waiting(one, 2)
    one.leave(ticket, Verdict.NONE)
    gone.cancel()

    one.leave(await stays, Verdict.SUCCESS)
    assert one.figures()["in_flight"] == 0


async def test_who_waits_when_the_target_falls_ill_is_told_so_and_all_places_come_back():
    one = guard(max_concurrent=1, breaker_failures=1)
    ticket = await one.enter()
    tasks = await waiting(one, 3)
    one.leave(ticket, Verdict.FAILURE, "broken")

    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in told] == [TargetUnavailable] * 3
    assert one.figures()["in_flight"] == 0
    assert one.health()["breaker"] == "open"
    assert one.health()["last_failure"] == "broken"


async def test_an_ill_target_is_tried_by_one_request_after_a_while():
    now = [0.0]
    one = TargetGuard("up", GuardLimits(breaker_failures=1, breaker_seconds=30.0), clock=lambda: now[0])
    one.leave(await one.enter(), Verdict.FAILURE, "broken")
    with pytest.raises(TargetUnavailable) as refusal:
        await one.enter()
    assert refusal.value.retry_after_seconds == 30.0

    now[0] = 30.0
    trial = await one.enter()
    with pytest.raises(TargetUnavailable):
        await one.enter()
    one.answered(trial)
    one.leave(await one.enter(), Verdict.SUCCESS)
    one.leave(trial, Verdict.SUCCESS)
    assert one.health()["last_failure"] is None


def test_limits_come_from_the_target_s_table_and_for_the_unified_upstream_from_server():
    settings = Settings(
        server=ServerSettings(api_base="http://h/v1", api_max_concurrent=7, api_max_queued=3),
        targets=(TargetSettings(name="t", base_url="http://t/v1", max_concurrent=2, breaker_failures=9),),
    )
    assert limits_of(settings, "t") == GuardLimits(2, 64, 30.0, 9, 30.0)
    assert limits_of(settings, "upstream") == GuardLimits(7, 3)
    assert limits_of(settings, "a pair, which looks after itself").breaker_failures == 0


async def test_an_ill_target_refuses_at_once_those_who_come_and_those_who_wait():
    one = guard(max_concurrent=1, health_seconds=20.0)
    ticket = await one.enter()
    waits = await waiting(one, 2)
    for _ in range(2):
        one.checked("GET /health answered 503")

    with pytest.raises(TargetUnavailable, match="GET /health answered 503") as refusal:
        await one.enter()
    assert refusal.value.retry_after_seconds == 20.0
    told = await asyncio.gather(*waits, return_exceptions=True)  # while the one that runs goes on
    assert [type(error) for error in told] == [TargetUnavailable] * 2
    assert (one.figures()["in_flight"], one.figures()["queued"]) == (1, 0)
    one.leave(ticket, Verdict.SUCCESS)
    one.checked("")
    one.leave(await one.enter(), Verdict.SUCCESS)
    assert one.figures() == {"in_flight": 0, "queued": 0, "breaker_state": 0, "healthy": 1}


async def test_a_client_that_leaves_just_as_it_is_turned_away_takes_no_place_with_it():
    one = guard(max_concurrent=1)
    ticket = await one.enter()
    (leaves,) = await waiting(one, 1)
    for _ in range(2):
        one.checked("no")
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert one.figures()["in_flight"] == 1
    one.leave(ticket, Verdict.SUCCESS)
    assert one.figures()["in_flight"] == 0


async def test_health_is_not_told_before_it_is_known():
    one = guard()
    assert "healthy" not in one.figures()
    one.checked("no")
    assert "healthy" not in one.figures()
    assert (one.health()["healthy"], one.health()["last_check"]) == (None, "no")
