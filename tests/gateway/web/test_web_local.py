"""The local engine behind the whole application: answers, headers, timings and how many at once."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from web_support import local_settings, running

from backends.protocol.messages import Timings, Usage
from gateway.core.types import CacheMode, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import LimitSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.waiting import until


async def test_a_stream_has_role_text_finish_and_done_in_this_order():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(model="scripted", stream=True)

    chunks = answer.chunks()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.text() == "Hello world"
    assert answer.finish_reasons() == ["stop"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert answer.data()[-1] == b"[DONE]"
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert "usage" not in chunks[-1]


async def test_a_whole_answer_has_text_and_usage():
    usage = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=8)
    script = [Started(10, 5), TextDelta("ab", 2), Finished(FinishReason.LENGTH, usage, Timings())]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = (await gateway.chat()).json()

    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert answer["model"] == "scripted"


@pytest.mark.parametrize("asked", [None, False, True])
async def test_st_14_usage_is_sent_once_and_only_if_asked(asked):
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        chunks = (await gateway.chat(stream=True, **options)).chunks()

    with_usage = [c for c in chunks if c.get("usage")]
    if asked:
        assert [c["choices"] for c in with_usage] == [[]]
        assert all(c["usage"] is None for c in chunks if c not in with_usage)
    else:
        assert with_usage == []
        assert all(c["choices"] for c in chunks)


async def test_headers_say_what_was_asked_what_served_and_why():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        asked = await gateway.chat(headers={"X-Cache-Mode": "disaggregated"}, stream=True)
        suffix = await gateway.chat(model="scripted:split")
        plain = await gateway.chat()
        by_path = await gateway.chat(path="/split/chat/completions")

    assert asked.headers["X-Cache-Mode"] == "split"
    assert asked.headers["X-Cache-Mode-Requested"] == "disaggregated"
    assert asked.headers["X-Cache-Mode-Source"] == "header"
    assert asked.headers["X-Cache-Mode-Reason"] == "local model"
    assert asked.headers["X-Cache-Backend"] == "local"
    assert (suffix.headers["X-Cache-Mode"], suffix.headers["X-Cache-Mode-Source"]) == ("split", "model")
    assert suffix.json()["model"] == "scripted"
    assert (plain.headers["X-Cache-Mode"], plain.headers["X-Cache-Mode-Source"]) == ("merged", "default")
    assert (by_path.headers["X-Cache-Mode"], by_path.headers["X-Cache-Mode-Source"]) == ("split", "path")
    assert "total;dur=" in plain.headers["Server-Timing"]
    assert "ttft;dur=" in asked.headers["Server-Timing"]


async def test_a_mode_that_cannot_be_served_is_refused_and_no_other_serves():
    engine = ScriptedUpstream(served_modes=(CacheMode.MERGED,))
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(headers={"X-Cache-Mode": "split"}, stream=True)

    assert (answer.status, answer.error["code"]) == (503, "mode_unavailable")
    assert answer.headers["Retry-After"] == "1"
    assert engine.requests == []


async def test_timings_come_before_done_and_in_the_record():
    timings = Timings(
        queue_seconds=0.1, prefill_seconds=0.2, transfer_seconds=0.04, transfer_overlapped_seconds=0.03,
        transfer_bytes=1000, decode_seconds=0.5, peak_kv_blocks={"decode": 4},
    )  # fmt: skip
    usage = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=3)
    script = [Started(9, 9), TextDelta("secret", 1), TextDelta("text", 1), Finished(FinishReason.STOP, usage, timings)]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = await gateway.chat(stream=True, headers={"X-Cache-Mode": "split", "X-Request-Id": "mine"})
        record = await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")
        missing = await gateway.get("/v1/requests/mine")
        moved = await gateway.metric("kvgate_kv_transfer_bytes_total", cache_mode="split", backend="local")
        overlap = await gateway.metric("kvgate_kv_transfer_overlap_ratio_sum", cache_mode="split", backend="local")

    before_done = answer.body.split(b"data: [DONE]")[0]
    comment = json.loads(before_done.split(b": kvgate ")[1].splitlines()[0])
    kept = record.json()
    for facts in (comment, kept["timings"]):
        assert facts["transfer_bytes"] == 1000
        assert facts["transfer_overlap_ratio"] == pytest.approx(0.75)
        assert facts["peak_kv_blocks"] == {"decode": 4}
        assert facts["cached_tokens"] == 3
        assert facts["time_to_first_token_seconds"] > 0
    assert (kept["outcome"], kept["status"], kept["client_request_id"]) == ("ok", 200, "mine")
    assert "secret" not in record.body.decode()
    assert missing.status == 404
    assert moved == 1000
    assert overlap == pytest.approx(0.75)


async def test_mt_01_held_back_text_is_not_the_first_token():
    go, held = asyncio.Event(), 0.05
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    script = [
        Started(1, 9), TextDelta("", 1), Pause(go), TextDelta("x", 1), Finished(FinishReason.STOP, usage, Timings()),
    ]  # fmt: skip
    engine = ScriptedUpstream(script)
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: engine.requests)
        since = time.monotonic()
        await until(lambda: time.monotonic() - since > held)
        go.set()
        answer = await task
        record = await gateway.record(answer)

    assert record["timings"]["time_to_first_token_seconds"] >= held


async def test_lc_01_the_same_client_id_twice_at_once_crosses_nothing():
    go = asyncio.Event()

    def script(request):
        name = request.prompt.messages[0]["content"]
        return [Started(1, 9), TextDelta(name, 1), Pause(go), *words("!")[1:]]

    engine = ScriptedUpstream(script)
    async with running(local_settings(), engine) as gateway:
        tasks = [
            asyncio.create_task(
                gateway.chat(messages=[{"role": "user", "content": name}], headers={"X-Request-Id": "same"})
            )
            for name in ("one", "two")
        ]
        await until(lambda: len(engine.requests) == 2)
        go.set()
        answers = await asyncio.gather(*tasks)

    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["one!", "two!"]
    assert len({a.headers["X-Request-Id"] for a in answers}) == 2
    assert {a.headers["X-Client-Request-Id"] for a in answers} == {"same"}


async def test_lc_06_too_many_at_once_get_429_and_when_to_come_back():
    engine = ScriptedUpstream([Started(1, 9), Pause(asyncio.Event())])
    async with running(local_settings(limits=LimitSettings(max_concurrent_requests=1)), engine) as gateway:
        first = asyncio.create_task(gateway.chat())
        await until(lambda: engine.requests)
        second = await gateway.chat()
        first.cancel()
        await until(lambda: engine.aborted)

    assert (second.status, second.error["code"]) == (429, "queue_full")
    assert second.headers["Retry-After"] == "1"


async def test_mt_02_what_a_client_writes_never_becomes_a_series():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        await gateway.chat(model="scripted")
        await gateway.chat(model="wrong")
        before = len((await gateway.get("/metrics")).body.splitlines())
        for number in range(50):
            await gateway.chat(model=f"m{number}", user=f"u{number}", headers={"X-Request-Id": f"r{number}"})
            await gateway.get(f"/path/{number}")
        after = await gateway.get("/metrics")

    assert len(after.body.splitlines()) == before
    assert b"m49" not in after.body


async def test_an_unknown_model_gets_the_list_of_models():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(model="gpt-9")

    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "scripted" in answer.error["message"]
