"""Breakers and queues of targets through the whole gateway: who is left alone, who waits, and who is to blame."""

from __future__ import annotations

import asyncio

import pytest
from resilience_support import MESSAGES, beats, two_targets
from web_answers import FAST, PLAIN, STREAM, error_answer, in_turn, tries
from web_support import (
    ROLE,
    Hold,
    Reset,
    Wait,
    chunk,
    fake_upstream,
    running,
    sse_answer,
)

from gateway.service import attempts as attempts_module
from gateway.service import exchange as exchange_module
from gateway.settings.schema import (
    RequestSettings,
    RetrySettings,
    Settings,
    TargetSettings,
)
from gateway.web.keys import IN_FORCE
from support.waiting import until, until_told


async def until_health(gateway, **wanted):
    return await until_told(lambda: gateway.health("a"), lambda health: wanted.items() <= health.items())


def soon_left_alone(upstream, seconds):
    target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=2, breaker_seconds=seconds)
    return Settings(targets=(target,), retry=RetrySettings(max_attempts=1))


async def test_a_breaker_opens_and_is_told():
    async with fake_upstream([Reset()]) as upstream, running(soon_left_alone(upstream, 60.0)) as gateway:
        failed = [(await gateway.chat(model="m")).status for _ in range(2)]
        refused = await gateway.chat(model="m", stream=True)
        ready = await gateway.health("a")
        text = (await gateway.get("/metrics")).body.decode()

    assert failed == [502, 502]
    assert (refused.status, refused.error["code"]) == (503, "target_unavailable")
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert (ready["breaker"], ready["failures"], ready["last_failure"]) == ("open", 2, "broken")
    assert 'kvgate_upstream_breaker_state{backend="a"} 2.0' in text
    assert len(upstream.seen) == 2


async def test_a_breaker_closes_again_once_a_request_is_answered():
    script = in_turn([Reset()], [Reset()], PLAIN)
    async with fake_upstream(script) as upstream, running(soon_left_alone(upstream, 0.01)) as gateway:
        for _ in range(2):
            await gateway.chat(model="m")
        await until_health(gateway, breaker="half_open")
        good = await gateway.chat(model="m")
        after = await gateway.health("a")

    assert (good.status, len(upstream.seen)) == (200, 3)
    assert (after["breaker"], after["failures"], after["last_failure"]) == ("closed", 0, None)


async def test_an_open_breaker_leads_straight_to_the_fallback():
    async with fake_upstream(error_answer(500)) as one, fake_upstream(PLAIN) as other:
        settings = two_targets(one, other, breaker_failures=1)
        async with running(settings) as gateway:
            await gateway.chat(model="m")
            answer = await gateway.chat(model="m")
            record = await gateway.record(answer)
    assert (answer.status, len(one.seen)) == (200, 1)
    assert tries(record) == [("a", "unavailable"), ("b", "ok")]
    assert "X-Kvgate-Attempts" not in answer.headers  # only one was sent


async def test_the_retries_of_one_request_are_one_failure():
    async with fake_upstream(error_answer(503)) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=2)
        async with running(Settings(targets=(target,), retry=FAST)) as gateway:
            await gateway.chat(model="m")
            health = await gateway.health("a")
    assert (health["failures"], health["breaker"], len(upstream.seen)) == (1, "closed", 3)


async def test_a_stream_that_breaks_after_its_first_token_counts_against_its_target():
    async with fake_upstream(sse_answer(ROLE, chunk("a"), Reset())) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1)
        async with running(Settings(targets=(target,))) as gateway:
            await gateway.chat(model="m", stream=True)
            health = await gateway.health("a")
    assert health["breaker"] == "open"


async def test_an_abort_does_not_count_against_the_target():
    async with fake_upstream([Hold()]) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1)
        async with running(Settings(targets=(target,))) as gateway:
            task = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: upstream.seen)
            task.cancel()
            await until(lambda: upstream.num_gone)
            health = await gateway.health("a")
    assert (health["breaker"], health["in_flight"]) == ("closed", 0)


def soon_late(upstream, **of_target):
    target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1, **of_target)
    return Settings(targets=(target,), request=RequestSettings(timeout_seconds=0.1))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [[Hold()], sse_answer(ROLE, Hold())], ids=["no head", "no token"])
async def test_a_target_that_is_silent_until_the_request_s_time_is_up_has_failed(steps, stream):
    if not stream and len(steps) > 1:
        steps = [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n", Hold()]
    async with fake_upstream(steps) as upstream, running(soon_late(upstream)) as gateway:
        late = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(late)
        health = await gateway.health("a")
        refused = await gateway.chat(model="m")

    assert (late.status, late.error["code"]) == (504, "upstream_timeout")
    assert (health["breaker"], health["last_failure"]) == ("open", "timeout")
    assert tries(record) == [("a", "timeout")]
    assert (refused.status, len(upstream.seen)) == (503, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_longer_than_a_request_may_take_is_no_failure_of_its_target(stream):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    steps = sse_answer(ROLE, chunk("a"), Hold()) if stream else [head, b'{"choices', Hold()]
    async with fake_upstream(steps) as upstream, running(soon_late(upstream)) as gateway:
        late = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(late)
        health = await gateway.health("a")

    assert (record["outcome"], health["breaker"], health["failures"]) == ("timeout", "closed", 0)


async def test_time_spent_in_the_queue_is_no_silence_of_the_target():
    async with fake_upstream([Hold()]) as upstream, running(soon_late(upstream, max_concurrent=1)) as gateway:
        guard = gateway.app[IN_FORCE].current.service.guards["a"]
        await guard.enter()  # takes the only place
        late = await gateway.chat(model="m")
        health = await gateway.health("a")

    assert (late.status, health["breaker"], len(upstream.seen)) == (504, "closed", 0)


class Turned:
    """Stands in for the time module."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    time = monotonic


async def test_silence_is_blamed_on_whoever_had_most_of_the_time(monkeypatch):
    """A fallback that was asked just before the end had no chance."""
    turned, broken = Turned(), asyncio.Event()
    monkeypatch.setattr(attempts_module, "time", turned)
    monkeypatch.setattr(exchange_module, "time", turned)
    async with fake_upstream([Wait(broken), Reset()]) as one, fake_upstream([Hold()]) as other:
        settings = two_targets(one, other, retry=RetrySettings(deadline_seconds=1000.0))
        settings = settings.model_copy(update={"request": RequestSettings(timeout_seconds=1.0)})
        async with running(settings) as gateway:
            task = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: one.seen)
            turned.now += 100.0
            broken.set()
            await until(lambda: other.seen)
            turned.now += 1.0
            late = await task
            a, b = await gateway.health("a"), await gateway.health("b")

    assert late.status == 504
    assert (a["failures"], b["failures"]) == (1, 0)


async def test_a_target_gets_no_more_at_once_than_it_takes_and_the_queue_is_bounded():
    go = asyncio.Event()
    async with fake_upstream(lambda _seen: [Wait(go), *PLAIN]) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), max_concurrent=2, max_queued=3)
        async with running(Settings(targets=(target,))) as gateway:
            tasks = [asyncio.create_task(gateway.chat(model="m")) for _ in range(5)]
            await until_health(gateway, queued=3)
            assert len(upstream.seen) <= 2
            text = (await gateway.get("/metrics")).body.decode()
            refused = await gateway.chat(model="m")
            go.set()
            answers = await asyncio.gather(*tasks)
            health = await gateway.health("a")

    assert 'kvgate_upstream_queued{backend="a"} 3.0' in text
    assert 'kvgate_upstream_in_flight{backend="a"} 2.0' in text
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert int(refused.headers["Retry-After"]) >= 1
    assert {answer.status for answer in answers} == {200}
    assert (health["in_flight"], health["queued"]) == (0, 0)


async def test_a_full_target_leads_to_the_fallback():
    go = asyncio.Event()
    async with (
        fake_upstream([Wait(go), *PLAIN]) as one,
        fake_upstream(PLAIN) as other,
        running(two_targets(one, other, max_concurrent=1, max_queued=0)) as gateway,
    ):
        task = asyncio.create_task(gateway.chat(model="m"))
        await until(lambda: one.seen)
        answer = await gateway.chat(model="m")
        go.set()
        first = await task
    assert (answer.status, answer.headers["X-Cache-Backend"]) == (200, "b")
    assert first.headers["X-Cache-Backend"] == "a"


async def test_a_client_that_waits_for_a_place_gets_heartbeats_until_there_is_one():
    go = asyncio.Event()
    async with fake_upstream(lambda seen: [Wait(go), *PLAIN] if not seen.json().get("stream") else STREAM) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), max_concurrent=1)
        async with running(Settings(targets=(target,), timeouts=beats())) as gateway:
            task = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: upstream.seen)
            body = {"model": "m", "messages": MESSAGES, "stream": True}
            async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
                seen = await response.content.readany()
                assert seen.startswith(b":")
                go.set()
                rest = await response.content.read()
            await task
    assert b'"hi"' in rest
    assert b"[DONE]" in rest
