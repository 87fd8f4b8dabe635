"""Heartbeats beside an answer: what they must never get into, come before or come after."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from typing_extensions import override
from web_answers import STREAM, WHOLE
from web_support import (
    DONE,
    Answer,
    Step,
    Wait,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    upstream_settings,
)

from gateway.core.errors import Overloaded
from gateway.core.types import ChatRequest, Started, StreamEvent, TextDelta
from gateway.settings.schema import RetrySettings, Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.scripted import ScriptedUpstream, words
from support.waiting import until

BEAT_SECONDS = 0.02
QUICK = TimeoutSettings(heartbeat_seconds=BEAT_SECONDS)
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
ANSWER = json.dumps(WHOLE).encode()


async def ask_of_one_who_pauses(*steps: Step) -> Answer:
    """The last step comes only after as long as several heartbeats take."""
    go = asyncio.Event()
    async with (
        fake_upstream([*steps[:-1], Wait(go), steps[-1]]) as upstream,
        running(upstream_settings(upstream.url, timeouts=QUICK)) as gateway,
    ):
        task = asyncio.create_task(gateway.post("/v1/chat/completions", BODY))
        await until(lambda: upstream.seen)
        loop, since = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await until(lambda: loop.time() - since > 10 * BEAT_SECONDS)
        go.set()
        return await task


async def test_an_answer_in_one_piece_has_no_heartbeat_in_it_however_slowly_it_comes():
    """Though a stream was asked for."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    answer = await ask_of_one_who_pauses(head + ANSWER[:9], ANSWER[9:])

    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json() == WHOLE


async def test_nothing_comes_after_the_end_of_a_stream_whose_connection_stays_open():
    answer = await ask_of_one_who_pauses(*STREAM, b": late\n\n")

    assert answer.body.endswith(DONE)


async def test_heartbeats_in_a_queue_go_out_as_the_stream_that_was_asked_for():
    go = asyncio.Event()

    def script(seen) -> list[Step]:
        return STREAM if seen.json().get("stream") else [Wait(go), *http_answer(ANSWER)]

    async with fake_upstream(script) as upstream:
        target = TargetSettings(name="a", base_url=upstream.url, models=("m",), max_concurrent=1)
        async with running(Settings(targets=(target,), timeouts=QUICK)) as gateway:
            first = asyncio.create_task(gateway.chat(model="m"))
            await until(lambda: upstream.seen)
            async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=BODY) as response:
                seen = await response.content.readany()
                go.set()
                seen += await response.content.read()
            await first

    assert seen.startswith(b": keep-alive")
    assert response.headers["Content-Type"] == "text/event-stream"


async def test_heartbeats_between_two_attempts_go_out_as_the_stream_that_was_asked_for():
    """Of which the first was answered in one piece, or seemed to be."""
    go = asyncio.Event()
    cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    scripts: list[list[Step]] = [[cut], [Wait(go), *STREAM]]
    async with fake_upstream(lambda _seen: scripts.pop(0)) as upstream:
        settings = upstream_settings(upstream.url, timeouts=QUICK, retry=RetrySettings(first_delay_seconds=0))
        async with (
            running(settings) as gateway,
            gateway.session.post(f"{gateway.url}/v1/chat/completions", json=BODY) as response,
        ):
            seen = await response.content.readany()
            go.set()
            seen += await response.content.read()

    assert seen.startswith(b": keep-alive")
    assert response.headers["Content-Type"] == "text/event-stream"


class JustAsABeatIsDue(ScriptedUpstream):
    """Goes on in the very turn of the loop in which a heartbeat is due, and ahead of it."""

    @override
    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamEvent, None]:
        yield Started(1, 9)
        loop, go = asyncio.get_running_loop(), asyncio.Event()
        loop.call_soon(go.set)
        since = loop.time()
        while loop.time() - since < 2 * BEAT_SECONDS:
            pass  # keeps the loop until it is due
        await go.wait()
        async with aclosing(super().stream(request)) as events:
            async for event in events:
                yield event


@pytest.mark.parametrize("place", ["chat/completions", "responses"])
async def test_a_heartbeat_that_is_due_with_the_first_text_leaves_it_the_turn(place):
    engine = JustAsABeatIsDue(words("hi"))
    async with running(local_settings(timeouts=QUICK), engine) as gateway:
        answer = await gateway.post(f"/v1/{place}", {**BODY, "model": "scripted", "input": "hi"})

    assert b"keep-alive" not in answer.body
    numbers = [event["sequence_number"] for event in answer.chunks() if "sequence_number" in event]
    assert numbers == sorted(numbers)


async def test_a_heartbeat_that_is_due_with_an_error_leaves_it_its_status():
    engine = JustAsABeatIsDue([Started(1, 9), Overloaded("full"), TextDelta("never", 1)])
    async with running(local_settings(timeouts=QUICK), engine) as gateway:
        answer = await gateway.post("/v1/chat/completions", {**BODY, "model": "scripted"})

    assert answer.status == 429
