"""Small faults of upstreams: which failure is told, waits that mean nothing, streams that nobody asked for."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest
from web_answers import FAST, ONCE, PLAIN, STREAM, WHOLE, error_answer, in_turn, tries
from web_support import (
    DONE,
    ROLE,
    Flood,
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

from gateway.service import opening, translated
from gateway.settings.schema import (
    KeySettings,
    PairSettings,
    RetrySettings,
    RouteSettings,
    Settings,
    TargetSettings,
    TimeoutSettings,
)
from support.waiting import until

MESSAGES = [{"role": "user", "content": "hi"}]


# -------------------------------------------------------------------------------------------- which models there are


async def test_a_model_is_not_refused_for_good_while_a_target_does_not_say_what_it_serves():
    """A client gives up at a 404; the target may only be starting."""
    async with running(Settings(targets=(TargetSettings(name="far", base_url="http://127.0.0.1:1"),))) as gateway:
        answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["code"]) == (503, "target_unavailable")
    assert answer.headers["Retry-After"] == "5"
    assert "far" in answer.error["message"]


async def test_a_model_of_a_pair_whose_servers_are_down_is_not_refused_for_good():
    down = PairSettings(name="pair", engine="vllm", merged=("http://127.0.0.1:1",))
    async with running(Settings(pairs=(down,))) as gateway:
        answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["code"]) == (503, "target_unavailable")


@pytest.mark.parametrize("listed", [error_answer(404), http_answer(b"no list"), http_answer(b'{"data":[{"id":"n"}]}')])
async def test_a_model_is_unknown_where_the_target_has_answered_for_its_models(listed):
    async with fake_upstream(listed) as far:
        settings = Settings(targets=(TargetSettings(name="far", base_url=far.url),))
        async with running(settings) as gateway:
            answer = await gateway.chat(model="m")

    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


# --------------------------------------------------------------------------------------------- which failure is told


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("script", "status", "code", "reason"),
    [
        ([Reset()], 502, "upstream_gone", "broken"),
        (error_answer(504), 504, None, "server_error"),
        (error_answer(503), 503, None, "server_error"),
    ],
)
async def test_a_breaker_that_opens_during_a_retry_does_not_hide_the_failure(script, status, code, reason, stream):
    async with fake_upstream(script) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=1)
        async with running(Settings(targets=(target,), retry=FAST)) as gateway:
            answer = await gateway.chat(model="m", stream=stream)
            attempts = tries(await gateway.record(answer))
            later = await gateway.chat(model="m", stream=stream)

    assert (answer.status, answer.error.get("code")) == (status, code)
    assert attempts == [("a", reason), ("a", "unavailable")]
    assert "Retry-After" not in answer.headers
    assert (later.status, later.error["code"]) == (503, "target_unavailable")  # this one was never sent
    assert len(upstream.seen) == 1


async def test_a_fallback_that_is_left_alone_does_not_hide_the_failure_and_is_not_named():
    async with fake_upstream([Reset()]) as ill, fake_upstream(error_answer(500)) as one:
        settings = Settings(
            targets=(
                TargetSettings(name="a", base_url=one.url, models=("m",), breaker_failures=0),
                TargetSettings(name="b", base_url=ill.url, models=("n",), breaker_failures=1),
            ),
            routes=(RouteSettings(model="m", target="a", fallbacks=("b",)),),
            retry=ONCE.model_copy(update={"max_attempts": 2}),
        )
        async with running(settings) as gateway:
            assert (await gateway.chat(model="n")).status == 502
            answer = await gateway.chat(model="m")
            attempts = tries(await gateway.record(answer))

    assert (answer.status, answer.error["message"]) == (500, "no")
    assert answer.headers["X-Cache-Backend"] == "a"
    assert "answered by" not in answer.headers.get("X-Kvgate-Notice", "")
    assert attempts == [("a", "server_error"), ("b", "unavailable")]


async def test_of_two_failures_that_were_both_made_the_last_is_told():
    async with fake_upstream(error_answer(500)) as one, fake_upstream(error_answer(504)) as other:
        settings = Settings(
            targets=(TargetSettings(name="a", base_url=one.url), TargetSettings(name="b", base_url=other.url)),
            routes=(RouteSettings(model="m", target="a", fallbacks=("b",)),),
            retry=RetrySettings(max_attempts=2),
        )
        async with running(settings) as gateway:
            answer = await gateway.chat(model="m")
    assert (answer.status, answer.headers["X-Cache-Backend"]) == (504, "b")


# --------------------------------------------------------------------------------------------------------- Retry-After


NONSENSE = ["-5", "soon", "inf", "nan", "1e400", "9" * 30, "Thu, 01 Jan 1970 00:00:00 GMT", "5; x=<script>"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wait", NONSENSE)
async def test_a_retry_after_that_means_nothing_is_not_passed_on(wait, stream):
    extra = f"Retry-After: {wait}\r\nRetry-After-Ms: {wait}\r\n"
    async with (
        fake_upstream(error_answer(503, extra=extra)) as upstream,
        running(upstream_settings(upstream.url, retry=ONCE)) as gateway,
    ):
        answer = await gateway.chat(model="m", stream=stream)
    assert answer.status == 503
    assert not any(name.lower().startswith("retry-after") for name in answer.headers)


@pytest.mark.parametrize("place", ["chat/completions", "messages"])
async def test_a_429_without_a_wait_that_means_anything_says_one_second(place):
    async with (
        fake_upstream(error_answer(429, extra="Retry-After: -1\r\n")) as upstream,
        running(upstream_settings(upstream.url, retry=ONCE)) as gateway,
    ):
        answer = await gateway.post(f"/v1/{place}", {"model": "m", "max_tokens": 5, "messages": MESSAGES})
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


async def test_a_wait_beside_an_answer_is_told_in_whole_seconds_too():
    script = http_answer(json.dumps(WHOLE).encode(), extra="Retry-After: 2.5\r\nretry-after-ms: nonsense\r\n")
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")
    assert (answer.status, answer.headers["Retry-After"]) == (200, "3")
    assert "Retry-After-Ms" not in answer.headers


# -------------------------------------------------------------------------------------- a stream that nobody asked for


@pytest.mark.parametrize("place", ["chat/completions", "completions"])
async def test_a_stream_that_nobody_asked_for_is_an_error_at_once_however_long_it_is(place):
    """Nothing of its body has come: whoever waited for the end would wait for ever."""
    async with (
        fake_upstream(sse_answer(Hold())) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        body = {"model": "m", "prompt": "hi", "messages": MESSAGES}
        async with asyncio.timeout(5):
            answer = await gateway.post(f"/v1/{place}", body)
        await until(lambda: upstream.num_gone)

    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert "text/event-stream" in answer.error["message"]
    assert len(upstream.seen) == 1  # it would answer the same again


async def test_a_fallback_answers_instead_of_a_stream_that_nobody_asked_for():
    async with fake_upstream(STREAM) as one, fake_upstream(PLAIN) as other:
        settings = Settings(
            targets=(TargetSettings(name="a", base_url=one.url), TargetSettings(name="b", base_url=other.url)),
            routes=(RouteSettings(model="m", target="a", fallbacks=("b",)),),
        )
        async with running(settings) as gateway:
            answer = await gateway.chat(model="m")
    assert (answer.status, answer.headers["X-Cache-Backend"]) == (200, "b")


async def test_a_translated_stream_that_nobody_asked_for_is_kept_only_as_far_as_a_whole_answer(monkeypatch):
    monkeypatch.setattr(translated, "MAX_ANSWER_BYTES", 2**20)
    flood = Flood(chunk("x" * 1000), 8 * 2**20)
    async with (
        fake_upstream(sse_answer(ROLE, flood)) as upstream,
        running(upstream_settings(upstream.url, retry=FAST)) as gateway,
    ):
        answer = await gateway.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": MESSAGES})
    assert (answer.status, answer.json()["type"]) == (502, "error")
    assert "longer than 1 MiB" in answer.error["message"]
    assert opening.MAX_ANSWER_BYTES > 2**20


# ----------------------------------------------------------------------------------------- cases of the handed list


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"<html>nope</html>", b"404 page not found", b""])
@pytest.mark.parametrize("place", ["chat/completions", "completions", "messages", "messages/count_tokens", "responses"])
async def test_au_08_a_404_shows_the_address_that_was_asked(place, body):
    dialects = ("openai_chat", "openai_completions", "openai_responses", "anthropic_messages")
    async with fake_upstream(http_answer(body, status="404 Not Found")) as upstream:
        target = TargetSettings(
            name="a", base_url=upstream.url + "/api", models=("m",), dialects=dialects, api_key="sk-fake-0000"
        )
        async with running(Settings(targets=(target,), retry=ONCE)) as gateway:
            fields = {"model": "m", "max_tokens": 5, "messages": MESSAGES, "prompt": "hi", "input": "hi"}
            answer = await gateway.post(f"/v1/{place}", fields)
    assert answer.status == 404
    assert f"{upstream.url}/api/v1/{place}" in answer.error["message"]
    assert "sk-fake" not in answer.body.decode()


async def test_au_08_a_404_in_the_api_s_own_words_passes_as_it_came():
    said = b'{"error":{"message":"no such model","type":"t","code":"model_not_found"}}'
    async with (
        fake_upstream(error_answer(404, body=said)) as upstream,
        running(upstream_settings(upstream.url, retry=ONCE)) as gateway,
    ):
        answer = await gateway.chat(model="m")
    assert (answer.status, answer.body) == (404, said)


@pytest.mark.parametrize(
    "script", [error_answer(401), error_answer(503), [Reset()], sse_answer(ROLE, Reset()), http_answer(b"<html>")]
)
async def test_au_03_no_key_is_in_the_log_at_any_level(script, caplog):
    caplog.set_level(logging.DEBUG)
    async with fake_upstream(script) as upstream:
        settings = upstream_settings(
            upstream.url,
            server={"api_key": "sk-fake-0000", "api_health_path": "/health"},
            keys=(KeySettings(key="sk-client-1", name="k"),),
            retry=FAST,
        )
        async with running(settings) as gateway:
            for key in ("sk-client-1", "FAKEWRONG"):
                for stream in (True, False):
                    await gateway.chat(model="m", stream=stream, headers={"Authorization": f"Bearer {key}"})
    logging.getLogger("gateway").debug("the log is read")
    assert "the log is read" in caplog.text
    assert not any(secret in caplog.text for secret in ("sk-fake-0000", "sk-client-1", "FAKEWRONG"))


@pytest.mark.parametrize("place", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("code", ["request_timeout", None])
async def test_st_29_a_fault_of_the_transport_that_is_told_as_the_request_s_own_is_a_5xx(place, code):
    frame = {"error": {"message": "upstream connect error", "type": "invalid_request_error", "code": code}}
    async with (
        fake_upstream(sse_answer(ROLE, b"data: " + json.dumps(frame).encode() + b"\n\n")) as upstream,
        running(upstream_settings(upstream.url, retry=ONCE)) as gateway,
    ):
        prompt = {"input": "hi"} if place == "responses" else {"messages": MESSAGES, "max_tokens": 5}
        answer = await gateway.post(f"/v1/{place}", {"model": "m", "stream": True, **prompt})
    assert answer.status >= 500
    assert "upstream connect error" in answer.error["message"]


async def test_st_23_an_answer_may_take_longer_than_each_limit():
    """Only the connection, the first byte and each silence are limited, never the whole."""
    limit, gap, num_gaps = 1.0, 0.3, 5
    gates = [asyncio.Event() for _ in range(num_gaps)]
    steps = [step for gate in gates for step in (chunk("a"), Wait(gate))]
    limits = TimeoutSettings(connect_seconds=limit, first_byte_seconds=limit, idle_seconds=limit)
    async with (
        fake_upstream(sse_answer(ROLE, *steps, chunk(finish="stop"), DONE)) as upstream,
        running(upstream_settings(upstream.url, timeouts=limits)) as gateway,
    ):
        task = asyncio.create_task(gateway.chat(model="m", stream=True))
        for gate in gates:
            since = time.monotonic()
            await until(lambda since=since: time.monotonic() - since > gap)
            gate.set()
        answer = await task
    assert (answer.text(), answer.done) == ("a" * num_gaps, True)


# ----------------------------------------------------------------------------------------------------- counting tokens


COUNT = {"model": "c", "messages": MESSAGES}
COUNTED = http_answer(b'{"input_tokens":12}')


def counting(upstream, retry=FAST, **more):
    target = TargetSettings(
        name="a", base_url=upstream.url, models=("c",), dialects=("anthropic_messages",), api_key="sk-up", **more
    )
    return Settings(targets=(target,), retry=retry)


async def count(gateway):
    return await gateway.post("/v1/messages/count_tokens", COUNT)


@pytest.mark.parametrize("first", [[Reset()], error_answer(502), error_answer(529, extra="Retry-After: 0.01\r\n")])
async def test_a_count_that_fails_is_asked_again(first):
    async with fake_upstream(in_turn(first, COUNTED)) as upstream, running(counting(upstream)) as gateway:
        answer = await count(gateway)
        text = (await gateway.get("/metrics")).body.decode()
    assert (answer.status, answer.json(), len(upstream.seen)) == (200, {"input_tokens": 12}, 2)
    assert 'kvgate_upstream_retries_total{backend="a"' in text


async def test_counting_ends_with_the_attempts_and_is_one_failure_of_the_target():
    async with (
        fake_upstream(error_answer(503)) as upstream,
        running(counting(upstream, breaker_failures=2)) as gateway,
    ):
        answer = await count(gateway)
        health = await gateway.health("a")
        await count(gateway)
        refused = await count(gateway)
    assert (answer.status, answer.error["message"]) == (503, "no")
    assert (health["failures"], health["breaker"]) == (1, "closed")
    assert (refused.status, len(upstream.seen)) == (529, 4)  # three attempts, one, and none
    assert "failed several times" in refused.error["message"]


async def test_a_count_takes_a_place_at_its_target_and_gives_it_back():
    async with (
        fake_upstream([Hold()]) as upstream,
        running(counting(upstream, max_concurrent=1, max_queued=0)) as gateway,
    ):
        task = asyncio.create_task(count(gateway))
        await until(lambda: upstream.seen)
        refused = await count(gateway)
        task.cancel()
        await until(lambda: upstream.num_gone)
        health = await gateway.health("a")
    assert refused.status == 529  # as this API says that it is busy
    assert (health["in_flight"], health["breaker"]) == (0, "closed")


@pytest.mark.parametrize(
    "script",
    [
        http_answer(b"<html>", content_type="text/html"),
        http_answer(b"[1]"),
        http_answer(b'{"input_tokens":'),
        http_answer(b'{"a":"' + b"x" * 100_000 + b'"}'),
        http_answer(b"", status="302 Found", extra="Location: /elsewhere\r\n"),
        sse_answer(Hold()),
    ],
)
async def test_what_is_no_count_is_a_502(script):
    async with fake_upstream(script) as upstream, running(counting(upstream)) as gateway:
        answer = await count(gateway)
    assert (answer.status, answer.json()["type"], len(upstream.seen)) == (502, "error", 1)


async def test_a_refusal_to_count_is_told_as_it_came():
    said = b'{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}'
    async with fake_upstream(error_answer(400, body=said)) as upstream, running(counting(upstream)) as gateway:
        answer = await count(gateway)
    assert (answer.status, answer.body, len(upstream.seen)) == (400, said, 1)
