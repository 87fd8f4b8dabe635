"""What goes wrong between other gateways and their upstreams: paths, fields, pace, silent cuts, who leaves."""

from __future__ import annotations

import asyncio
import json

import pytest
from web_support import (
    DONE,
    ROLE,
    Wait,
    chunk,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.app import build_app, make_runner
from gateway.core.errors import ContextLengthExceeded
from gateway.core.types import Started, TextDelta
from gateway.settings.schema import Settings, TargetSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.waiting import until

WHOLE = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}], "content": [], "output": []}
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
ALL = ("openai_chat", "openai_completions", "openai_responses", "anthropic_messages")


@pytest.mark.parametrize(
    ("base", "path"),
    [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/v1//", "/v1"), ("/v1/v1", "/v1"),
     ("/api", "/api/v1"), ("/v1/messages", "/v1"), ("/v1/chat/completions", "/v1"), ("/api/paas/v4", "/api/paas/v4")],
)  # fmt: skip
async def test_au_07_and_au_08_every_api_s_path_is_joined_alike(base, path):
    async with fake_upstream(http_answer(json.dumps(WHOLE).encode())) as upstream:
        target = TargetSettings(name="t", base_url=upstream.url + base, models=("m",), dialects=ALL)
        async with running(Settings(targets=(target,))) as gateway:
            for place, body in BODIES.items():
                await gateway.post(f"/v1/{place}", {"model": "m", **body})
    assert [seen.path for seen in upstream.seen] == [f"{path}/{place}" for place in BODIES]


async def test_rv_17_extra_body_is_neither_made_up_nor_unwrapped():
    async with (
        fake_upstream(http_answer(json.dumps(WHOLE).encode())) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        await gateway.chat(model="m", top_k=5)
        await gateway.chat(model="m", extra_body={"top_k": 5})
    plain, wrapped = (seen.json() for seen in upstream.seen)
    assert (plain["top_k"], "extra_body" in plain) == (5, False)
    assert (wrapped["extra_body"], "top_k" in wrapped) == ({"top_k": 5}, False)


async def test_rv_17_the_local_engine_says_that_extra_body_has_no_effect():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(extra_body={"top_k": 5})
    assert "extra_body" in answer.headers["X-Kvgate-Notice"]


@pytest.mark.parametrize("place", ["chat/completions", "messages", "responses"])
async def test_st_24_what_has_come_is_passed_on_before_the_rest_comes(place):
    """Of an upstream, as it is and translated; and of the local engine."""
    go = asyncio.Event()
    steps = (ROLE, chunk("first"), Wait(go), chunk("second"), chunk(finish="stop"), DONE)
    local = ScriptedUpstream([Started(1, 9), TextDelta("first", 1), Pause(go), *words("second")[1:]])
    async with fake_upstream(sse_answer(*steps)) as upstream:
        for settings, engine in ((upstream_settings(upstream.url), None), (local_settings(), local)):
            go.clear()
            async with running(settings, engine) as gateway:
                body = {"model": "scripted", **BODIES[place], "stream": True}
                async with gateway.session.post(f"{gateway.url}/v1/{place}", json=body) as response:
                    seen = bytearray()
                    async with asyncio.timeout(10):
                        while b"first" not in seen:
                            seen += await response.content.readany()
                        assert b"second" not in seen
                        go.set()
                        while b"second" not in seen:
                            seen += await response.content.readany()


async def test_cx_04_an_upstream_that_cuts_the_prompt_is_told_of():
    long = "The quick brown fox jumps over the lazy dog. " * 2000
    usage = {"prompt_tokens": 2051, "completion_tokens": 1}
    async with (
        fake_upstream(http_answer(json.dumps({**WHOLE, "usage": usage}).encode())) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        messages = [{"role": "user", "content": long}]
        as_it_is = await gateway.chat(model="m", messages=messages)
        translated = await gateway.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": messages})
        honest = await gateway.chat(model="m")
    assert "cut the prompt" in as_it_is.headers["X-Kvgate-Notice"]
    assert "cut the prompt" in translated.headers["X-Kvgate-Notice"]
    assert "X-Kvgate-Notice" not in honest.headers


async def test_cx_03_a_prompt_that_is_too_long_holds_up_nobody():
    def script(request):
        said = request.prompt.messages[0]["content"]
        return [ContextLengthExceeded("maximum context length is 9 tokens")] if said == "long" else words("a")

    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        asked = [gateway.chat(messages=[{"role": "user", "content": text}]) for text in ("a", "b", "long", "c")]
        answers = await asyncio.gather(*asked)
    assert [answer.status for answer in answers] == [200, 200, 400, 200]


async def test_st_19_a_client_that_leaves_cancels_its_handler_in_the_runner_that_serve_uses():
    runner = make_runner(build_app(local_settings(), engine=ScriptedUpstream()))
    await runner.setup()
    try:
        assert runner.server is not None
        assert runner.server.handler_cancellation
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("place", ["chat/completions", "messages", "messages/count_tokens", "responses"])
async def test_st_19_whoever_leaves_without_a_stream_ends_the_work(place):
    class Slow(ScriptedUpstream):
        async def count_tokens(self, request) -> int:
            self.requests.append(request)
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append(request.request_id)
            return 0

    engine = Slow([Started(1, 9), Pause(asyncio.Event())])
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.post(f"/v1/{place}", {"model": "scripted", **BODIES[place]}))
        await until(lambda: engine.requests)
        task.cancel()
        await until(lambda: engine.aborted, "the engine was told")
