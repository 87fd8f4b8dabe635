"""An engine that dies before the first token and comes back: the request waits for it, and is told what happened."""

from __future__ import annotations

import asyncio

import pytest
from web_answers import FAST, in_turn
from web_support import local_settings, running

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, CacheStrategy, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import RetrySettings, TimeoutSettings
from gateway.upstreams.scripted import ScriptedUpstream, words
from support.waiting import until

DIES = [Started(1, 9), UpstreamGone("The merged engine process is gone.")]


def down(seconds: float = 0.0) -> list:
    reason = "Mode 'merged' can't be served now: merged is restarting."
    return [ModeUnavailable(reason, retry_after_seconds=seconds, is_restarting=True)]


def outcomes(record):
    return [attempt["outcome"] for attempt in record["attempts"]]


class Restarting(ScriptedUpstream):
    """Down after its first request, until the test says that it is back."""

    num_waits = 0

    async def back(self, strategy) -> None:
        self.num_waits += 1
        await ScriptedUpstream.back(self, strategy)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_whose_engine_died_is_answered_once_it_is_back(stream):
    engine = Restarting(in_turn(DIES, down(), words("hi")))
    async with running(local_settings(retry=FAST), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=stream))
        await until(lambda: engine.num_waits)
        assert len(engine.requests) == 2
        assert not task.done()
        engine.is_back.set()
        answer = await task
        record = await gateway.record(answer)
        broken, waited = [
            await gateway.metric("kvgate_upstream_retries_total", backend="local", reason=reason)
            for reason in ("broken", "restarting")
        ]

    assert answer.status == 200
    assert b"hi" in answer.body
    assert outcomes(record) == ["broken", "restarting", "ok"]
    assert answer.headers["X-Kvgate-Attempts"] == "2"  # it was sent twice
    assert "the engine was being started again: waited" in answer.headers["X-Kvgate-Notice"]
    assert any("waited" in notice for notice in record["notices"])
    assert (broken, waited or 0) == (1, 0)  # sent again once, whatever it waited for
    assert engine.num_waits == 1


async def test_a_request_that_finds_its_mode_restarting_waits_too():
    engine = Restarting(in_turn(down(), words("hi")))
    engine.is_back.set()
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat()
        record = await gateway.record(answer)

    assert (answer.status, outcomes(record)) == (200, ["restarting", "ok"])
    assert "X-Kvgate-Attempts" not in answer.headers


@pytest.mark.parametrize("error", [ModeUnavailable("given up"), ModeUnavailable("starting", retry_after_seconds=1.0)])
async def test_a_mode_that_is_not_restarting_fails_at_once(error):
    engine = Restarting([error])
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat()

    assert (answer.status, answer.error["code"], engine.num_waits) == (503, "mode_unavailable", 0)
    assert ("Retry-After" in answer.headers) is (error.retry_after_seconds is not None)


async def test_an_engine_that_is_given_up_meanwhile_is_not_waited_for_any_more():
    engine = Restarting(in_turn(down(), [ModeUnavailable("merged is failed")]))
    engine.is_back.set()
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat()

    assert (answer.status, answer.error["message"]) == (503, "merged is failed")
    assert "Retry-After" not in answer.headers


async def test_a_restart_beyond_what_may_be_waited_for_is_told_to_the_client():
    engine = Restarting(down(7.0))
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat()

    assert (answer.status, answer.headers["Retry-After"], engine.num_waits) == (503, "7", 0)


async def test_the_wait_ends_with_the_deadline():
    retry = RetrySettings(first_delay_seconds=0.0, deadline_seconds=0.05)
    engine = Restarting(down())
    async with running(local_settings(retry=retry), engine) as gateway:
        answer = await gateway.chat()

    assert (answer.status, answer.error["code"], engine.num_waits) == (503, "mode_unavailable", 1)
    assert answer.headers["Retry-After"] == "1"


async def test_the_death_is_told_if_the_engine_does_not_come_back():
    engine = Restarting(in_turn(DIES, [ModeUnavailable("merged is failed")]))
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat()
        record = await gateway.record(answer)

    assert (answer.status, answer.error["code"]) == (502, "upstream_gone")
    assert outcomes(record) == ["broken", "unavailable"]


async def test_a_request_that_may_be_what_kills_the_engine_is_sent_twice_and_no_more():
    engine = Restarting(in_turn(DIES, down(), DIES, words("never")))
    engine.is_back.set()
    async with running(local_settings(retry=RetrySettings(first_delay_seconds=0.0, max_attempts=9)), engine) as gateway:
        answer = await gateway.chat()
        record = await gateway.record(answer)

    assert (answer.status, outcomes(record)) == (502, ["broken", "restarting", "broken"])


async def test_merged_stands_in_at_once_instead_of_waiting_where_the_settings_say_so():
    engine = Restarting(lambda request: down() if request.strategy.mode is CacheMode.SPLIT else words("hi"))
    retry = RetrySettings(first_delay_seconds=0.0, merged_for_split=True)
    async with running(local_settings(retry=retry), engine) as gateway:
        answer = await gateway.chat(headers={"X-Cache-Mode": "split"})

    assert (answer.status, answer.headers["X-Cache-Mode"], engine.num_waits) == (200, "merged", 0)


async def test_a_client_that_leaves_while_it_waits_leaves_nothing():
    engine = Restarting(down())
    async with running(local_settings(retry=FAST), engine) as gateway:
        task = asyncio.create_task(gateway.chat())
        await until(lambda: engine.num_waits)
        task.cancel()
        await until(lambda: gateway.records._records)
        (record,) = gateway.records._records.values()

    assert record.outcome == "client_gone"
    assert len(engine.requests) == 1


async def test_a_stream_that_waits_has_heartbeats_and_then_its_answer():
    engine = Restarting(in_turn(down(), words("hi")))
    settings = local_settings(retry=FAST, timeouts=TimeoutSettings(heartbeat_seconds=0.02))
    async with running(settings, engine) as gateway:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert (await response.content.readany()).startswith(b":")  # the headers are out
            engine.is_back.set()
            text = await response.text()

    assert '"hi"' in text
    assert "[DONE]" in text


class Counting(Restarting):
    """Counts like `answers`, of which each is a number or an error."""

    def __init__(self, *answers: int | Exception) -> None:
        super().__init__(words("never"))
        self.answers = list(answers)
        self.counted: list[CacheStrategy] = []

    async def count_tokens(self, request) -> int:
        self.counted.append(request.strategy)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def count(gateway, **headers):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return gateway.post("/v1/messages/count_tokens", body, headers=headers)


@pytest.mark.parametrize("begins", [[], [UpstreamGone("gone")]])
async def test_a_count_waits_for_an_engine_that_is_being_started_again(begins):
    engine = Counting(*begins, *down(), 7)
    async with running(local_settings(retry=FAST), engine) as gateway:
        task = asyncio.create_task(count(gateway))
        await until(lambda: engine.num_waits)
        assert not task.done()
        engine.is_back.set()
        answer = await task

    assert (answer.status, answer.json()) == (200, {"input_tokens": 7})
    assert len(engine.counted) == len(begins) + 2


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([*down()], (529, "can't be served now")),
        ([UpstreamGone("the engine is gone"), *down()], (502, "the engine is gone")),
    ],
)
async def test_a_count_waits_no_longer_than_any_request(answers, told):
    retry = RetrySettings(first_delay_seconds=0.0, deadline_seconds=0.05)
    engine = Counting(*answers)
    async with running(local_settings(retry=retry), engine) as gateway:
        answer = await count(gateway)

    assert (answer.status, engine.num_waits) == (told[0], 1)
    assert told[1] in answer.error["message"]


async def test_a_count_of_an_engine_that_is_given_up_fails_at_once():
    engine = Counting(ModeUnavailable("given up"))
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await count(gateway)

    assert (answer.status, engine.num_waits, len(engine.counted)) == (529, 0, 1)  # Anthropic's word for it


async def test_after_the_first_token_a_death_is_an_error_event_as_before():
    engine = Restarting([Started(1, 9), TextDelta("hi", 1), UpstreamGone("gone")])
    engine.is_back.set()
    async with running(local_settings(retry=FAST), engine) as gateway:
        answer = await gateway.chat(stream=True)

    assert (answer.status, len(engine.requests), answer.done) == (200, 1, False)
    assert b'"error"' in answer.body


@pytest.mark.parametrize("stream", [True, False])
async def test_st_27_an_empty_engine_output_is_no_chunk_and_no_token(stream):
    """Engines report steps that only computed a part of a long prompt; nothing was made, so it can be asked again."""
    usage = Usage(prompt_tokens=5, completion_tokens=1)
    prefill = [Started(5, 9), *[TextDelta("", 0)] * 4]
    good = [*prefill, TextDelta("x", 1), Finished(FinishReason.STOP, usage, Timings())]
    engine = Restarting(in_turn([*prefill, UpstreamGone("gone")], down(), good))
    async with running(local_settings(retry=FAST), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=stream))
        await until(lambda: engine.num_waits)
        engine.is_back.set()
        answer = await task
        record = await gateway.record(answer)

    assert outcomes(record) == ["broken", "restarting", "ok"]
    if stream:
        deltas = [choice["delta"] for piece in answer.chunks() for choice in piece["choices"]]
        assert [delta["content"] for delta in deltas if delta.get("content")] == ["x"]
        assert len([delta for delta in deltas if delta.get("role")]) == 1
        assert len(deltas) <= 3  # role, text, end: none of an empty output
    assert "inter_token_seconds" not in record["timings"]  # one token has no gap
