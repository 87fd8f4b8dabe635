"""Retries, fallbacks, breakers and queues through the whole gateway: before the first token only, and always told."""

from __future__ import annotations

import asyncio
import json
import time
from email.utils import formatdate

import pytest
from web_support import (
    DONE,
    ROLE,
    Hold,
    Reset,
    Wait,
    chunk,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    sse_answer,
    until,
    upstream_settings,
)

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import EngineSettings, RetrySettings, RouteSettings, Settings, TargetSettings
from gateway.upstreams.scripted import ScriptedUpstream, words

WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
PLAIN = http_answer(json.dumps(WHOLE).encode())
STREAM = sse_answer(ROLE, chunk("hi"), chunk(finish="stop"), DONE)
FAST = RetrySettings(first_delay_seconds=0.0)
MESSAGES = [{"role": "user", "content": "hi"}]


def error_answer(status: int, *, extra: str = "", body: bytes = b'{"error":{"message":"no","type":"t"}}'):
    return http_answer(body, status=f"{status} No", extra=extra)


def in_turn(*scripts):
    """The first request gets the first script, and so on; the last one is for all that follow."""
    left = list(scripts)
    return lambda _seen: left.pop(0) if len(left) > 1 else left[0]


def two_targets(one, other, *, retry=FAST, fallbacks=("b",), **of_a):
    return Settings(
        targets=(
            TargetSettings(name="a", base_url=one.url, models=("m",), **of_a),
            TargetSettings(name="b", base_url=other.url, models=("n",)),
        ),
        routes=(
            RouteSettings(model="m", target="a", fallbacks=fallbacks),
            RouteSettings(model="m", target="b", upstream_model="n"),
        ),
        retry=retry,
    )


async def record_of(gateway, answer):
    return (await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")).json()


async def health_of(gateway, target="a"):
    return (await gateway.get("/ready")).json()["targets"][target]


async def until_health(gateway, **wanted):
    async with asyncio.timeout(10):
        while not wanted.items() <= (health := await health_of(gateway)).items():  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.002)
    return health


def tries(record):
    return [(attempt["backend"], attempt["outcome"]) for attempt in record["attempts"]]


# ---------------------------------------------------------------------------------------------------------- one target


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [[Reset()], error_answer(502), error_answer(503), error_answer(504)])
async def test_a_failure_that_passes_is_tried_again(first, stream):
    async with (
        fake_upstream(in_turn(first, STREAM if stream else PLAIN)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)
        record = await record_of(gateway, answer)
        reason = record["attempts"][0]["outcome"]
        counted = await gateway.metric("kvgate_upstream_retries_total", backend="upstream", reason=reason)

    assert answer.status == 200
    assert answer.headers["X-Kvgate-Attempts"] == "2"
    assert len(upstream.seen) == 2
    assert upstream.seen[0].body == upstream.seen[1].body
    assert [outcome for _, outcome in tries(record)] == [reason, "ok"]
    assert all(attempt["seconds"] >= 0 for attempt in record["attempts"])
    assert counted == 1


async def test_one_attempt_is_not_worth_a_header():
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")
        record = await record_of(gateway, answer)
    assert "X-Kvgate-Attempts" not in answer.headers
    assert tries(record) == [("upstream", "ok")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500, 529])
async def test_what_asking_again_does_not_mend_is_asked_once(status, stream):
    async with (
        fake_upstream(error_answer(status)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)
    assert answer.status == status
    assert len(upstream.seen) == 1


async def test_an_upstream_that_says_so_is_not_asked_again():
    script = error_answer(503, extra="X-Should-Retry: false\r\n")
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url, retry=FAST)) as gateway:
        answer = await gateway.chat(model="m")
    assert (answer.status, answer.headers["X-Should-Retry"], len(upstream.seen)) == (503, "false", 1)


async def test_attempts_end_and_the_last_error_is_told():
    async with (
        fake_upstream(error_answer(503)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True)
        record = await record_of(gateway, answer)
    assert answer.status == 503
    assert answer.headers["X-Kvgate-Attempts"] == "3"
    assert tries(record) == [("upstream", "server_error")] * 3
    assert len(upstream.seen) == 3


async def test_one_attempt_can_be_all():
    retry = RetrySettings(max_attempts=1)
    async with (
        fake_upstream([Reset()]) as upstream,
        running(upstream_settings(upstream.url, retry=retry)) as gateway,
    ):
        answer = await gateway.chat(model="m")
    assert (answer.status, len(upstream.seen)) == (502, 1)


async def test_no_attempt_begins_after_the_deadline():
    retry = RetrySettings(first_delay_seconds=0.0, deadline_seconds=0.0)
    async with (
        fake_upstream(error_answer(503)) as upstream,
        running(upstream_settings(upstream.url, retry=retry)) as gateway,
    ):
        answer = await gateway.chat(model="m")
    assert (answer.status, len(upstream.seen)) == (503, 1)


@pytest.mark.parametrize("steps", [(), (ROLE,), (b": wait\n\n",)])
async def test_a_stream_that_breaks_before_its_first_token_is_asked_for_again(steps):
    async with (
        fake_upstream(in_turn(sse_answer(*steps, Reset()), STREAM)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True)
    assert (answer.status, answer.text(), answer.done, len(upstream.seen)) == (200, "hi", True, 2)
    assert answer.body.count(b'"role"') == 1


@pytest.mark.parametrize("place", ["chat/completions", "messages", "responses"])
async def test_after_the_first_token_nothing_is_sent_again(place):
    prompt = {"input": "hi"} if place == "responses" else {"messages": MESSAGES, "max_tokens": 5}
    body = {"model": "m", **prompt, "stream": True}
    async with (
        fake_upstream(sse_answer(ROLE, chunk("hi"), Reset())) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.post(f"/v1/{place}", body)
    assert answer.status == 200
    assert b"hi" in answer.body
    assert b"error" in answer.body
    assert len(upstream.seen) == 1


async def test_half_an_answer_in_one_piece_is_not_asked_for_again():
    """Its tokens were all made: asking again would have them made, and paid for, twice."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\nConnection: close\r\n\r\n"
    async with (
        fake_upstream([head + b'{"choices":[']) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m")
    assert (answer.status, answer.error["code"], len(upstream.seen)) == (502, "upstream_gone", 1)


async def test_the_connection_of_an_attempt_is_closed_before_the_next_one():
    async with (
        fake_upstream(in_turn(sse_answer(ROLE, Hold()), STREAM)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST, timeouts={"idle_seconds": 0.05})) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True)
        await until(lambda: upstream.num_gone)
    assert (answer.text(), len(upstream.seen)) == ("hi", 2)


async def test_a_client_that_leaves_ends_the_retries():
    retry = RetrySettings(first_delay_seconds=0.05, max_delay_seconds=0.05, max_attempts=20)
    async with (
        fake_upstream(error_answer(503)) as upstream,
        running(upstream_settings(upstream.url, retry=retry)) as gateway,
    ):
        task = asyncio.create_task(gateway.chat(model="m"))
        await until(lambda: len(upstream.seen) >= 2)
        task.cancel()
        await until(lambda: gateway.records._records)
        num_seen = len(upstream.seen)
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert len(upstream.seen) == num_seen
        (record,) = gateway.records._records.values()
    assert record.outcome == "client_gone"


# --------------------------------------------------------------------------------------------------------- Retry-After


async def test_a_short_retry_after_is_waited_for():
    busy = error_answer(429, extra="Retry-After: 0.05\r\n")
    async with (
        fake_upstream(in_turn(busy, PLAIN)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        since = time.monotonic()
        answer = await gateway.chat(model="m")
        took = time.monotonic() - since
    assert (answer.status, len(upstream.seen)) == (200, 2)
    assert took >= 0.05


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    ("wait", "told"), [("7", "7"), ("7.2", "8"), (formatdate(4102444800, usegmt=True), "86400"), ("9" * 18, "86400")]
)
async def test_a_long_retry_after_is_passed_on_in_whole_seconds_of_one_day_at_most(status, wait, told):
    async with (
        fake_upstream(error_answer(status, extra=f"Retry-After: {wait}\r\n")) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=True)
    assert (answer.status, answer.headers["Retry-After"], len(upstream.seen)) == (status, told, 1)


async def test_a_storm_of_429_neither_opens_the_breaker_nor_multiplies():
    storm = error_answer(429, extra="Retry-After: 60\r\n")
    async with (
        fake_upstream(storm) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answers = await asyncio.gather(*(gateway.chat(model="m") for _ in range(30)))
        ready = (await gateway.get("/ready")).json()
    assert {answer.status for answer in answers} == {429}
    assert len(upstream.seen) == 30
    assert ready["targets"]["upstream"]["breaker"] == "closed"


# ----------------------------------------------------------------------------------------------------------- fallbacks


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ([Reset()], "broken"),
        (error_answer(500), "server_error"),
        (error_answer(503), "server_error"),
        (error_answer(429, extra="Retry-After: 60\r\n"), "overloaded"),
        (http_answer(b"<html>", content_type="text/html"), "server_error"),
    ],
)
async def test_a_fallback_answers_and_is_named(first, reason, stream):
    async with (
        fake_upstream(first) as one,
        fake_upstream(STREAM if stream else PLAIN) as other,
        running(two_targets(one, other)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)
        record = await record_of(gateway, answer)
        labels = {"from_backend": "a", "to_backend": "b", "reason": reason}
        counted = await gateway.metric("kvgate_upstream_fallbacks_total", **labels)

    assert (answer.status, answer.headers["X-Cache-Backend"]) == (200, "b")
    assert answer.headers["X-Cache-Mode-Reason"] == f"fallback from a ({reason}); route m"
    assert "answered by b, since a failed" in answer.headers["X-Kvgate-Notice"]
    assert tries(record) == [("a", reason), ("b", "ok")]
    assert (record["backend"], record["upstream_model"]) == ("b", "n")
    assert other.seen[0].json()["model"] == "n"
    assert len(one.seen) == 1
    assert counted == 1


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refusal_of_the_request_is_no_reason_to_ask_elsewhere(status):
    async with (
        fake_upstream(error_answer(status)) as one,
        fake_upstream(PLAIN) as other,
        running(two_targets(one, other)) as gateway,
    ):
        answer = await gateway.chat(model="m")
    assert (answer.status, len(other.seen)) == (status, 0)


async def test_a_target_that_the_client_forced_has_no_fallback():
    async with (
        fake_upstream(error_answer(500)) as one,
        fake_upstream(PLAIN) as other,
        running(two_targets(one, other)) as gateway,
    ):
        answer = await gateway.chat(model="m", headers={"X-Cache-Backend": "a"})
    assert (answer.status, len(other.seen)) == (500, 0)


async def test_after_all_have_failed_the_first_is_asked_again():
    async with (
        fake_upstream(in_turn(error_answer(503), PLAIN)) as one,
        fake_upstream(error_answer(500)) as other,
        running(two_targets(one, other)) as gateway,
    ):
        answer = await gateway.chat(model="m")
        record = await record_of(gateway, answer)
    assert answer.status == 200
    assert answer.headers["X-Cache-Backend"] == "a"
    assert tries(record) == [("a", "server_error"), ("b", "server_error"), ("a", "ok")]


async def test_a_fallback_that_can_not_be_asked_this_is_passed_over():
    async with fake_upstream(error_answer(500)) as one, fake_upstream(PLAIN) as other:
        settings = two_targets(one, other)
        a = TargetSettings(name="a", base_url=one.url, models=("m",), dialects=("anthropic_messages",))
        b = TargetSettings(name="b", base_url=other.url, dialects=("openai_responses",))
        async with running(settings.model_copy(update={"targets": (a, b)})) as gateway:
            answer = await gateway.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": MESSAGES})
    assert answer.status == 500
    assert answer.headers["X-Cache-Backend"] == "a"
    assert "X-Kvgate-Attempts" not in answer.headers
    assert answer.headers["X-Kvgate-Notice"].startswith("b could not stand in: Upstream 'b' speaks openai_responses")
    assert len(other.seen) == 0


async def test_going_back_past_a_fallback_that_can_not_be_asked_is_no_fallback():
    """The target answers itself, and nothing may say that it stands in for itself."""
    async with fake_upstream(in_turn(error_answer(503), PLAIN)) as one, fake_upstream(PLAIN) as other:
        settings = two_targets(one, other)
        b = TargetSettings(name="b", base_url=other.url, dialects=("anthropic_messages",))
        async with running(settings.model_copy(update={"targets": (settings.targets[0], b)})) as gateway:
            answer = await gateway.chat(model="m")
            record = await record_of(gateway, answer)
    assert (answer.status, answer.headers["X-Cache-Backend"]) == (200, "a")
    assert answer.headers["X-Cache-Mode-Reason"] == "route m"
    assert "answered by" not in answer.headers["X-Kvgate-Notice"]
    assert tries(record) == [("a", "server_error"), ("a", "ok")]


async def test_headers_that_are_out_hold_the_request_at_its_target():
    """They name who answers; an answer by someone else would make them a lie."""
    go = asyncio.Event()
    stalled = sse_answer(ROLE, Wait(go), Reset())
    async with (
        fake_upstream(in_turn(stalled, STREAM)) as one,
        fake_upstream(STREAM) as other,
        running(two_targets(one, other).model_copy(update={"timeouts": beats()})) as gateway,
    ):
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            go.set()
            text = await response.text()
    assert response.headers["X-Cache-Backend"] == "a"
    assert '"hi"' in text
    assert (len(one.seen), len(other.seen)) == (2, 0)


def beats():
    from gateway.settings.schema import TimeoutSettings

    return TimeoutSettings(heartbeat_seconds=0.02)


# --------------------------------------------------------------------------------------------------- the local engine


def split_fails(error):
    """A script by which split requests fail and merged ones are answered."""
    return lambda request: [error] if request.strategy.mode is CacheMode.SPLIT else words("hi")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "reason"), [(UpstreamGone("peer lost"), "broken"), (ModeUnavailable("starting"), "unavailable")]
)
async def test_merged_stands_in_for_split_only_where_the_settings_say_so(error, reason, stream):
    for allowed in (False, True):
        retry = RetrySettings(first_delay_seconds=0.0, merged_for_split=allowed)
        async with running(local_settings(retry=retry), ScriptedUpstream(split_fails(error))) as gateway:
            answer = await gateway.chat(model="scripted", stream=stream, headers={"X-Cache-Mode": "split"})
        if allowed:
            assert (answer.status, answer.headers["X-Cache-Mode"]) == (200, "merged")
            assert answer.headers["X-Cache-Mode-Requested"] == "split"
            assert answer.headers["X-Cache-Mode-Reason"] == f"fallback from split ({reason}); local model"
            assert "answered by merged, since split failed" in answer.headers["X-Kvgate-Notice"]
        else:
            assert answer.status in (502, 503)
            assert answer.headers["X-Cache-Mode"] == "split"


async def test_the_record_has_the_mode_of_each_attempt():
    retry = RetrySettings(merged_for_split=True)
    async with running(local_settings(retry=retry), ScriptedUpstream(split_fails(UpstreamGone("x")))) as gateway:
        answer = await gateway.chat(model="scripted", headers={"X-Cache-Mode": "split"})
        record = await record_of(gateway, answer)
    assert [(attempt["cache_mode"], attempt["outcome"]) for attempt in record["attempts"]] == [
        ("split", "broken"),
        ("merged", "ok"),
    ]


async def test_a_merged_request_never_becomes_a_split_one():
    retry = RetrySettings(first_delay_seconds=0.0, merged_for_split=True)
    engine = ScriptedUpstream([UpstreamGone("x")])
    async with running(local_settings(retry=retry), engine) as gateway:
        answer = await gateway.chat(model="scripted", headers={"X-Cache-Mode": "merged"})
    assert answer.status == 502
    assert {request.strategy.mode for request in engine.requests} == {CacheMode.MERGED}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_its_first_token_is_asked_again_and_not_after(stream):
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    good = [Started(1, 9), TextDelta("hi", 1), Finished(FinishReason.STOP, usage, Timings())]
    for first, num_asked in (([Started(1, 9), UpstreamGone("x")], 2), ([*good[:2], UpstreamGone("x")], 1)):
        engine = ScriptedUpstream(in_turn(first, good))
        async with running(local_settings(retry=FAST), engine) as gateway:
            answer = await gateway.chat(model="scripted", stream=stream)
        assert len(engine.requests) == num_asked
        assert (b"error" in answer.body) is (num_asked == 1)


async def test_an_upstream_stands_in_for_the_engine_and_the_engine_for_an_upstream():
    async with fake_upstream(in_turn(PLAIN, error_answer(500))) as upstream:
        settings = Settings(
            engine=EngineSettings(served_name="scripted"),
            targets=(TargetSettings(name="a", base_url=upstream.url),),
            routes=(
                RouteSettings(model="one", target="local", fallbacks=("a",)),
                RouteSettings(model="two", target="a", fallbacks=("local",)),
            ),
            retry=FAST,
        )
        engine = ScriptedUpstream(in_turn([ModeUnavailable("starting")], words("local")))
        async with running(settings, engine) as gateway:
            first = await gateway.chat(model="one")
            second = await gateway.chat(model="two")
    assert (first.status, first.headers["X-Cache-Backend"], first.headers["X-Cache-Mode"]) == (200, "a", "unknown")
    assert upstream.seen[0].json()["model"] == "one"
    assert (second.headers["X-Cache-Backend"], second.headers["X-Cache-Mode"]) == ("local", "merged")
    assert second.json()["choices"][0]["message"]["content"] == "local"


# ---------------------------------------------------------------------------------------------- breakers, then queues


def soon_left_alone(upstream, seconds):
    target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=2, breaker_seconds=seconds)
    return Settings(targets=(target,), retry=RetrySettings(max_attempts=1))


async def test_a_breaker_opens_and_is_told():
    async with fake_upstream([Reset()]) as upstream, running(soon_left_alone(upstream, 60.0)) as gateway:
        failed = [(await gateway.chat(model="m")).status for _ in range(2)]
        refused = await gateway.chat(model="m", stream=True)
        ready = await health_of(gateway)
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
        after = await health_of(gateway)

    assert (good.status, len(upstream.seen)) == (200, 3)
    assert (after["breaker"], after["failures"], after["last_failure"]) == ("closed", 0, None)


async def test_an_open_breaker_leads_straight_to_the_fallback():
    async with fake_upstream(error_answer(500)) as one, fake_upstream(PLAIN) as other:
        settings = two_targets(one, other, breaker_failures=1)
        async with running(settings) as gateway:
            await gateway.chat(model="m")
            answer = await gateway.chat(model="m")
            record = await record_of(gateway, answer)
    assert (answer.status, len(one.seen)) == (200, 1)
    assert tries(record) == [("a", "unavailable"), ("b", "ok")]
    assert "X-Kvgate-Attempts" not in answer.headers  # only one was sent


async def test_the_retries_of_one_request_are_one_failure():
    async with fake_upstream(error_answer(503)) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=2)
        async with running(Settings(targets=(target,), retry=FAST)) as gateway:
            await gateway.chat(model="m")
            health = await health_of(gateway)
    assert (health["failures"], health["breaker"], len(upstream.seen)) == (1, "closed", 3)


async def test_a_stream_that_breaks_after_its_first_token_counts_against_its_target():
    async with fake_upstream(sse_answer(ROLE, chunk("a"), Reset())) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1)
        async with running(Settings(targets=(target,))) as gateway:
            await gateway.chat(model="m", stream=True)
            health = await health_of(gateway)
    assert health["breaker"] == "open"


async def test_an_abort_does_not_count_against_the_target():
    async with fake_upstream([Hold()]) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1)
        async with running(Settings(targets=(target,))) as gateway:
            task = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: upstream.seen)
            task.cancel()
            await until(lambda: upstream.num_gone)
            health = await health_of(gateway)
    assert (health["breaker"], health["in_flight"]) == ("closed", 0)


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
            health = await health_of(gateway)

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
