"""The local engine behind the whole application: errors, silence, clients that leave, time that is up."""

from __future__ import annotations

import asyncio
import json

import pytest
from web_support import local_settings, running

from gateway.core.errors import ContextLengthExceeded, KVPoolTooSmall, UpstreamGone
from gateway.core.types import FinishReason, Started, TextDelta
from gateway.settings.schema import RequestSettings, TimeoutSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.waiting import until


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("maximum context length is 8 tokens"), 400, "context_length_exceeded"),
        (KVPoolTooSmall("the pool holds 64 tokens"), 400, "kv_pool_too_small"),
        (UpstreamGone("died"), 502, "upstream_gone"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_cx_01_an_error_before_the_first_text_is_an_http_error(error, status, code, stream):
    async with running(local_settings(), ScriptedUpstream([Started(1, 1), TextDelta("", 1), error])) as gateway:
        answer = await gateway.chat(stream=stream)

    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Cache-Mode"] == "merged"


async def test_st_10_an_engine_that_dies_after_text_ends_with_an_error_event_and_nothing_clean():
    script = [Started(1, 9), TextDelta("half", 1), UpstreamGone("The engine died.")]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = await gateway.chat(stream=True)
        failed = await gateway.metric(
            "kvgate_requests_total", dialect="openai_chat", cache_mode="merged", backend="local", outcome="error"
        )

    assert answer.status == 200
    assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_gone"
    assert not answer.done
    assert answer.finish_reasons() == []
    assert failed == 1


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_st_10_an_aborted_generation_never_looks_finished(reason):
    async with running(local_settings(), ScriptedUpstream(words("a", reason=reason))) as gateway:
        streamed = await gateway.chat(stream=True)
        whole = await gateway.chat()

    assert not streamed.done
    assert whole.status == 502


@pytest.mark.parametrize("stream", [True, False])
async def test_st_18_a_client_that_leaves_aborts_the_generation(stream):
    engine = ScriptedUpstream([Started(1, 9), TextDelta("a", 1), Pause(asyncio.Event())])
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=stream))
        await until(lambda: engine.requests)
        task.cancel()
        await until(lambda: engine.aborted)
        await until(lambda: len(gateway.records))
        after = await gateway.get(f"/v1/requests/{engine.aborted[0]}")

    assert engine.aborted == [engine.requests[0].request_id]
    assert after.json()["outcome"] == "client_gone"


async def test_a_client_that_leaves_before_the_first_text_aborts_too():
    engine = ScriptedUpstream([Started(1, 9), Pause(asyncio.Event())])
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: engine.requests)
        task.cancel()
        await until(lambda: engine.aborted)


async def test_silence_gets_heartbeats_and_headers_go_ahead_of_the_text():
    go = asyncio.Event()
    engine = ScriptedUpstream([Started(1, 9), Pause(go), *words("late")[1:]])
    settings = local_settings(timeouts=TimeoutSettings(heartbeat_seconds=0.02))
    async with running(settings, engine) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert response.headers["X-Cache-Mode"] == "merged"
            read = b""
            while read.count(b": keep-alive\n\n") < 3:
                read += await response.content.readany()
            go.set()
            read += await response.content.read()

    assert read.startswith(b": keep-alive\n\n")
    assert b"late" in read
    assert read.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_heartbeats_is_an_event():
    go = asyncio.Event()
    engine = ScriptedUpstream([Started(1, 9), Pause(go), UpstreamGone("died")])
    async with running(local_settings(timeouts=TimeoutSettings(heartbeat_seconds=0.01)), engine) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            await response.content.readany()
            go.set()
            rest = await response.content.read()

    assert b'data: {"error":' in rest
    assert b"[DONE]" not in rest


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_takes_too_long_ends_and_is_aborted(stream):
    engine = ScriptedUpstream([Started(1, 9), TextDelta("a", 1), Pause(asyncio.Event())])
    async with running(local_settings(request=RequestSettings(timeout_seconds=0.05)), engine) as gateway:
        answer = await gateway.chat(stream=stream)
        await until(lambda: engine.aborted)
        record = await gateway.record(answer)

    assert (record["outcome"], [tried["outcome"] for tried in record["attempts"]]) == ("timeout", ["timeout"])
    if stream:
        assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_timeout"
        assert not answer.done
    else:
        assert answer.status == 504
