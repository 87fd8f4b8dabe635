"""Retries and fallbacks through the whole gateway: before the first token only, and always told."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

import pytest
from resilience_support import MESSAGES, beats, two_targets
from web_answers import FAST, PLAIN, STREAM, error_answer, in_turn, tries
from web_support import (
    ROLE,
    Close,
    Hold,
    Reset,
    Wait,
    chunk,
    fake_upstream,
    http_answer,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.settings.schema import (
    RetrySettings,
    TargetSettings,
)
from support.waiting import until

# ---------------------------------------------------------------------------------------------------------- one target


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [[Reset()], error_answer(502), error_answer(503), error_answer(504)])
async def test_a_failure_that_passes_is_tried_again(first, stream):
    async with (
        fake_upstream(in_turn(first, STREAM if stream else PLAIN)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(answer)
        reason = record["attempts"][0]["outcome"]
        counted = await gateway.metric("kvgate_upstream_retries_total", backend="upstream", reason=reason)

    assert answer.status == 200
    assert answer.headers["X-Kvgate-Attempts"] == "2"
    assert len(upstream.seen) == 2
    assert upstream.seen[0].body == upstream.seen[1].body
    assert [outcome for _, outcome in tries(record)] == [reason, "ok"]
    assert all(attempt["seconds"] >= 0 for attempt in record["attempts"])
    assert counted == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_goes_out_again_since_a_kept_connection_ended_is_told_as_sent_twice(stream):
    """The upstream may have had it the first time; here it has."""
    script = in_turn(PLAIN, [Close()], STREAM if stream else PLAIN)
    retry = RetrySettings(max_attempts=1)
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url, retry=retry)) as gateway:
        first = await gateway.chat(model="m")
        second = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(second)

    assert (first.status, second.status, len(upstream.seen), upstream.num_connections) == (200, 200, 3, 2)
    assert "X-Kvgate-Attempts" not in first.headers
    assert second.headers["X-Kvgate-Attempts"] == "2"
    assert tries(record) == [("upstream", "ok")]


async def test_one_attempt_is_not_worth_a_header():
    async with fake_upstream(PLAIN) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")
        record = await gateway.record(answer)
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
        record = await gateway.record(answer)
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
        record = await gateway.record(answer)
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
        record = await gateway.record(answer)
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
            record = await gateway.record(answer)
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
