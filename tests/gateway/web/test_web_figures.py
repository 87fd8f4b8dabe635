"""Figures that could be wrong though every answer is right: tokens counted from text, gauges below zero."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from web_support import (
    DONE,
    ROLE,
    Reset,
    Seen,
    Step,
    chunk,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    sse_answer,
    upstream_settings,
)

from backends.protocol.messages import Timings, Usage
from gateway.core.types import Finished, FinishReason, Started, TextDelta
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.waiting import until

NUM_SPACES = 100  # a tokenizer may make one token of many blanks, and few of them are words


def usage_chunk(**usage: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c1", "choices": [], "usage": usage}).encode() + b"\n\n"


def local_spaces(sizes: list[int]) -> ScriptedUpstream:
    """One token a blank, in deltas of these sizes."""
    usage = Usage(prompt_tokens=3, completion_tokens=NUM_SPACES)
    deltas = [TextDelta(" " * size, size) for size in sizes]
    return ScriptedUpstream([Started(3, 200), *deltas, Finished(FinishReason.LENGTH, usage, Timings())])


async def generated(gateway: Any) -> float:
    """Tokens of all targets and modes."""
    found = values((await gateway.get("/metrics")).body)
    return sum(value for name, value in found if name.startswith("kvgate_generation_tokens_total{"))


@pytest.mark.parametrize("sizes", [[1] * NUM_SPACES, [10] * 10, [NUM_SPACES]])
async def test_mt_05_tokens_of_the_local_engine_are_its_own_count(sizes: list[int]):
    async with running(local_settings(), local_spaces(sizes)) as gateway:
        answer = await gateway.chat(stream=True, stream_options={"include_usage": True})
        record = await gateway.record(answer)
        counted = await generated(gateway)

    assert answer.text() == " " * NUM_SPACES
    assert answer.chunks()[-1]["usage"]["completion_tokens"] == NUM_SPACES
    assert record["timings"]["completion_tokens"] == counted == NUM_SPACES


@pytest.mark.parametrize("stream", [True, False])
async def test_mt_05_tokens_of_an_upstream_are_its_own_count(stream: bool):
    usage = {"prompt_tokens": 3, "completion_tokens": NUM_SPACES, "total_tokens": NUM_SPACES + 3}
    spaces = [chunk(" " * 20)] * 5
    message = {"role": "assistant", "content": " " * NUM_SPACES}
    whole = {"id": "c1", "choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage}
    streamed = sse_answer(ROLE, *spaces, chunk(finish="length"), usage_chunk(**usage), DONE)
    script = streamed if stream else http_answer(json.dumps(whole).encode())
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(answer)
        counted = await generated(gateway)

    assert record["timings"]["completion_tokens"] == counted == NUM_SPACES


async def test_mt_05_what_an_upstream_does_not_count_stays_unknown():
    """Neither the text's length nor the number of chunks is passed off as a count of tokens."""
    script = sse_answer(ROLE, *[chunk(" ")] * NUM_SPACES, chunk(finish="length"), DONE)
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)
        record = await gateway.record(answer)
        counted = await generated(gateway)

    assert answer.text() == " " * NUM_SPACES
    assert record["timings"].get("completion_tokens") is None
    assert counted == 0


def values(metrics: bytes) -> Iterator[tuple[str, float]]:
    for line in metrics.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            yield name, float(value)


async def scraped(gateway: Any) -> dict[str, float]:
    found = dict(values((await gateway.get("/metrics")).body))
    assert found
    below_zero = {name: value for name, value in found.items() if value < 0}
    assert below_zero == {}
    return found


async def test_mt_09_requests_of_one_id_leave_no_figure_below_zero():
    """One ends, one is left by its client, one fails; and the same id comes again right after."""
    go = asyncio.Event()
    engine = ScriptedUpstream([Started(1, 9), TextDelta("a", 1), Pause(go), *words("!")[1:]])
    headers = {"X-Request-Id": "same"}
    async with running(local_settings(), engine) as gateway:
        tasks = [asyncio.create_task(gateway.chat(stream=True, headers=headers)) for _ in range(3)]
        await until(lambda: len(engine.requests) == 3)
        during = await scraped(gateway)
        tasks[0].cancel()
        await until(lambda: engine.aborted)
        tasks.append(asyncio.create_task(gateway.chat(stream=True, headers=headers)))
        await until(lambda: len(engine.requests) == 4)
        await scraped(gateway)
        go.set()
        answers = await asyncio.gather(*tasks[1:])
        after = await scraped(gateway)

    assert [answer.text() for answer in answers] == ["a!"] * 3
    assert during["kvgate_requests_in_flight"] == 3
    assert after["kvgate_requests_in_flight"] == 0


BAD_COUNTS: list[dict[str, Any]] = [
    {"prompt_tokens": -7, "completion_tokens": -3, "total_tokens": -10},
    {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -4}},
    {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 99}},
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("usage", BAD_COUNTS)
async def test_mt_09_no_count_of_an_upstream_takes_a_figure_back(usage: dict[str, Any], path: str):
    """A counter that is told to fall raises: it must neither fall nor take the answer with it."""
    good = {"prompt_tokens": 7, "completion_tokens": 3}
    counts = iter([good, usage, good])
    body = {"model": "m", "stream": True} | ({"max_tokens": 9} if path == "/v1/messages" else {})
    prompt = {"input": "hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hi"}]}

    def script(seen: Seen) -> list[Step]:
        return sse_answer(ROLE, chunk("a"), chunk(finish="stop"), usage_chunk(**next(counts)), DONE)

    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        figures = []
        for _ in range(3):
            answer = await gateway.post(path, {**body, **prompt})
            assert answer.status == 200
            assert b'"error":{' not in answer.body.replace(b" ", b"")
            found = await scraped(gateway)
            figures.append({name: value for name, value in found.items() if "_total{" in name})

    for before, after in itertools.pairwise(figures):
        assert {name for name in before if after[name] < before[name]} == set()


async def test_mt_09_broken_answers_give_back_what_they_held():
    script = sse_answer(ROLE, chunk("a"), Reset())
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        for _ in range(3):
            await gateway.chat(model="m", stream=True, headers={"X-Request-Id": "same"})
        found = await scraped(gateway)

    gauges = [name for name in found if name.startswith(("kvgate_requests_in_flight", "kvgate_upstream_in_flight"))]
    assert gauges
    assert {found[name] for name in gauges} == {0}
