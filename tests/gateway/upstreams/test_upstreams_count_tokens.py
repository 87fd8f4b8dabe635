"""Questions for a token count over an engine's link: answered by number, and ended when the engine dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.protocol.framing import Encoder
from backends.protocol.messages import (
    ChatPrompt,
    CountTokens,
    EngineStats,
    Generate,
    GetStats,
    StatsReport,
    TextPrompt,
    TokenCount,
)
from gateway.core.errors import InvalidRequest, ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, Started
from gateway.upstreams.engine.connection import EngineConnection
from support.engine_upstream import make_request, running_upstream

PROMPT = TextPrompt(text="a")


class Link:
    """Remembers what was said to the engine."""

    is_open = True

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        Encoder().encode(message)
        self.said.append(message)


async def asked(question):
    """The question as a task that has been sent."""
    task = asyncio.create_task(question)
    await asyncio.sleep(0)
    return task


async def test_each_answer_goes_to_its_question():
    link = Link()
    connection = EngineConnection(link, "merged")  # type: ignore[arg-type]
    first, stats, second = [
        await asked(question)
        for question in (connection.count_tokens(PROMPT), connection.stats(), connection.count_tokens(PROMPT))
    ]
    assert [type(message) for message in link.said] == [CountTokens, GetStats, CountTokens]
    numbers = [message.number for message in link.said]
    connection.take(TokenCount(number=numbers[2], prompt_tokens=2))
    connection.take(StatsReport(number=numbers[1], stats={"merged": EngineStats(num_running=1)}))
    connection.take(TokenCount(number=numbers[0], prompt_tokens=1))
    connection.take(TokenCount(number=99, prompt_tokens=9))

    assert ((await first).prompt_tokens, (await second).prompt_tokens) == (1, 2)
    assert (await stats).num_running == 1


async def test_whoever_counts_hears_of_the_engine_s_death():
    connection = EngineConnection(Link(), "merged")  # type: ignore[arg-type]
    task = await asked(connection.count_tokens(PROMPT))
    connection.lost("killed")
    with pytest.raises(UpstreamGone, match="killed"):
        await task


async def test_an_engine_process_counts_what_it_would_compute():
    async with running_upstream("tokens=2") as upstream:
        for mode in CacheMode:
            request = make_request(mode, "one two three")
            started = [event async for event in upstream.stream(request) if isinstance(event, Started)]
            assert await upstream.count_tokens(request) == started[-1].prompt_tokens
    with pytest.raises(ModeUnavailable):
        await upstream.count_tokens(request)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
async def test_a_number_that_the_link_can_not_carry_is_the_client_s_fault(number: int):
    tools = [{"function": {"name": "f", "parameters": {"maximum": number}}}]
    prompt = ChatPrompt(messages=[{"role": "user", "content": "a"}], tools=tools)
    connection = EngineConnection(Link(), "merged")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="64 bits"):
        await connection.count_tokens(prompt)
    with pytest.raises(InvalidRequest, match="64 bits"):
        connection.open(Generate(request_id="r", prompt=prompt))
    assert not connection._channels
    assert not connection._questions
