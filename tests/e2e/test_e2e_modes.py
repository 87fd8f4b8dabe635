"""The main job through real processes: the mode asked for serves, and both modes say the same."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from support.gateway_process import GatewayProcess, wait_until
from support.sse import Answer, read_stream

MODES = ["merged", "split"]
LONG = 1500  # tokens; several seconds of decoding


def chat(prompt: str, *, max_tokens: int = 24, **fields: object) -> dict[str, object]:
    message = {"role": "user", "content": prompt}
    return {
        "model": "tiny", "stream": True, "temperature": 0, "max_tokens": max_tokens, "messages": [message],
        "ignore_eos": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip


async def ask(session: aiohttp.ClientSession, gateway: GatewayProcess, body: dict[str, object], mode: str) -> Answer:
    return await read_stream(session, gateway.url + "/v1/chat/completions", body, {"X-Cache-Mode": mode})


@pytest.mark.parametrize("mode", MODES)
async def test_the_mode_of_the_header_serves(session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str):
    answer = await ask(session, gateway, chat("What is a KV cache?"), mode)

    assert answer.status == 200
    assert answer.headers["x-cache-mode"] == mode
    assert answer.headers["x-cache-mode-source"] == "header"
    assert answer.done
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 24
    record = gateway.get(f"/v1/requests/{answer.headers['x-request-id']}")
    assert "tiny" in json.dumps(record)
    assert any("kvgate" in comment for comment in answer.comments)


async def test_both_modes_and_both_transfers_answer_alike(session: aiohttp.ClientSession, gateway: GatewayProcess):
    body = chat("the cache holds keys and values " * 20, max_tokens=48)
    merged = await ask(session, gateway, body, "merged")
    layer = await ask(
        session, gateway, {**body, "cacheStrategy": {"mode": "split", "kvTransferProtocol": "layer-wise"}}, "split"
    )
    whole = await ask(
        session, gateway, {**body, "cacheStrategy": {"mode": "split", "kvTransferProtocol": "request-wise"}}, "split"
    )

    assert merged.text
    assert merged.text == layer.text == whole.text


@pytest.mark.parametrize("mode", MODES)
async def test_streams_and_whole_answers_have_the_same_text(
    session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str
):
    body = chat("read so far")
    streamed = await ask(session, gateway, body, mode)
    whole = await ask(
        session, gateway, {k: v for k, v in body.items() if k != "stream_options"} | {"stream": False}, mode
    )

    assert whole.body["choices"][0]["message"]["content"] == streamed.text
    assert whole.headers["x-cache-mode"] == mode
    assert "prefill;dur=" in whole.headers["server-timing"]


@pytest.mark.parametrize("mode", MODES)
async def test_eight_streams_finish_right_when_a_ninth_client_leaves(
    session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str
):
    bodies = [chat(f"the model {number} has read " * (number + 1), max_tokens=40) for number in range(8)]
    alone = [await ask(session, gateway, body, mode) for body in bodies]

    leaving = asyncio.create_task(leave_after_first_text(session, gateway, mode))
    together = await asyncio.gather(*(ask(session, gateway, body, mode) for body in bodies))
    await leaving

    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert all(answer.done and answer.finish_reason == "length" for answer in together)
    await asyncio.to_thread(wait_until, lambda: not any(gateway.blocks_in_use().values()), "no block is in use", 5)


async def leave_after_first_text(session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str) -> None:
    body = chat("every token", max_tokens=LONG)
    async with session.post(
        gateway.url + "/v1/chat/completions", json=body, headers={"X-Cache-Mode": mode}
    ) as response:
        async for chunk in response.content.iter_any():
            if b'"content"' in chunk:
                return


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_a_whole_answer_frees_its_blocks(
    session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str
):
    body = chat("values of every token", max_tokens=LONG) | {"stream": False}
    del body["stream_options"]
    task = asyncio.create_task(ask(session, gateway, body, mode))
    await asyncio.to_thread(wait_until, lambda: any(gateway.blocks_in_use().values()), "it runs", 10)
    task.cancel()

    await asyncio.to_thread(wait_until, lambda: not any(gateway.blocks_in_use().values()), "no block is in use", 5)


async def test_a_second_turn_hits_the_prefix_cache_in_each_mode(
    session: aiohttp.ClientSession, gateway: GatewayProcess
):
    for mode in MODES:
        body = chat(f"{mode} blocks of sixteen " * 30, max_tokens=4)
        first = await ask(session, gateway, body, mode)
        second = await ask(session, gateway, body, mode)
        assert first.usage is not None
        assert second.usage is not None
        assert first.usage["prompt_tokens_details"]["cached_tokens"] < 32  # the template's own start may be known
        cached = second.usage["prompt_tokens_details"]["cached_tokens"]
        assert second.usage["prompt_tokens"] - 17 <= cached < second.usage["prompt_tokens"]
        assert first.text == second.text


@pytest.mark.parametrize("prefix", ["/merged/v1", "/split/v1", "/merged", "/split"])
async def test_the_path_chooses_the_mode(session: aiohttp.ClientSession, gateway: GatewayProcess, prefix: str):
    answer = await read_stream(session, gateway.url + prefix + "/chat/completions", chat("path", max_tokens=2))

    assert answer.headers["x-cache-mode"] == prefix.split("/")[1]
    assert answer.headers["x-cache-mode-source"] == "path"


async def test_the_model_suffix_the_query_and_the_body_choose_the_mode(
    session: aiohttp.ClientSession, gateway: GatewayProcess
):
    url = gateway.url + "/v1/chat/completions"
    suffix = await read_stream(session, url, chat("x", max_tokens=2, model="tiny:split"))
    query = await read_stream(session, url + "?cache_mode=split", chat("x", max_tokens=2))
    body = await read_stream(session, url, chat("x", max_tokens=2, cacheStrategy="split"))

    got = [(a.headers["x-cache-mode"], a.headers["x-cache-mode-source"]) for a in (suffix, query, body)]
    assert got == [("split", "model"), ("split", "query"), ("split", "body")]
