"""Requests that overlap on real engines: none is cut, slowed to a stop or mixed up by another."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from test_e2e_modes import MODES, ask, chat

from support.gateway_process import GatewayProcess
from support.sse import Answer

NUM_TOKENS = 200
LAYOUTS = {"one engine": ("merged", "merged"), "split twice": ("split", "split"), "two engines": ("merged", "split")}
COUNTED = {
    "model": "tiny",
    "max_tokens": 1,
    "system": "keys and values",
    "messages": [{"role": "user", "content": "of every token that a model has read so far " * 20}],
}


async def count(session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str) -> int:
    url = f"{gateway.url}/v1/messages/count_tokens?beta=true"
    async with session.post(url, json=COUNTED, headers={"X-Cache-Mode": mode}) as response:
        assert response.status == 200, await response.text()
        number: int = (await response.json())["input_tokens"]
        return number


async def count_until(stop: asyncio.Event, session: aiohttp.ClientSession, gateway: GatewayProcess) -> list[int]:
    """In both modes by turns, one question right after the other."""
    counts = []
    while not stop.is_set():
        counts += [await count(session, gateway, mode) for mode in MODES]
    return counts


def facts(answer: Answer) -> tuple[Any, ...]:
    assert answer.error is None
    assert answer.usage is not None
    return answer.text, answer.finish_reason, answer.done, answer.usage["completion_tokens"]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_kv_12_overlapping_streams_end_whole_while_tokens_are_counted(
    session: aiohttp.ClientSession, gateway: GatewayProcess, layout: str
):
    modes = LAYOUTS[layout]
    bodies = [chat(f"the model {number} holds keys", max_tokens=NUM_TOKENS) for number in range(2)]
    alone = [await ask(session, gateway, body, mode) for body, mode in zip(bodies, modes, strict=True)]
    counted = await count(session, gateway, modes[0])

    stop = asyncio.Event()
    counting = asyncio.create_task(count_until(stop, session, gateway))
    together = await asyncio.gather(
        *(ask(session, gateway, body, mode) for body, mode in zip(bodies, modes, strict=True))
    )
    stop.set()
    counts = await counting

    assert [facts(answer) for answer in together] == [facts(answer) for answer in alone]
    assert {finish for _, finish, _, _ in map(facts, together)} == {"length"}
    assert facts(together[0])[0] != facts(together[1])[0]
    assert set(counts) == {counted}, f"{len(counts)} questions"


async def test_kv_12_a_second_request_does_not_end_the_first_even_with_its_own_words(
    session: aiohttp.ClientSession, gateway: GatewayProcess
):
    """The same conversation sent again while it is answered, as a client does that lost patience."""
    body = chat("every token of the cache", max_tokens=NUM_TOKENS)
    answers = await asyncio.gather(*(ask(session, gateway, body, mode) for mode in (*MODES, *MODES)))

    assert {facts(answer)[1:] for answer in answers} == {("length", True, NUM_TOKENS)}
    assert len({facts(answer)[0] for answer in answers}) == 1
