"""A real vLLM pair behind the gateway: the same text in both modes, KV that moves, nothing left behind, recovery."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest

from support.gateway_process import GatewayProcess, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPTS = [
    "Write one sentence about the sea.",
    "List three colours and three animals, one per line.",
    "Repeat after me: " + "alpha beta gamma delta " * 40,
    "Explain in two sentences why the sky is blue. " * 12,
]
NUM_ABORTED = 200
AT_ONCE = 24  # more would only wait: a core computes one or two of these prompts in a second


def body(content: str, **more: Any) -> dict[str, Any]:
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": content}]}
    return {**chat, "temperature": 0, "max_tokens": 24, **more}


def ask(gateway: GatewayProcess, mode: str, content: str, **more: Any) -> tuple[int, dict[str, str], Any]:
    return gateway.call("POST", "/v1/chat/completions", body(content, **more), {"X-Cache-Mode": mode})


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def in_use(servers: Any) -> list[float]:
    return [
        server.figure(name)
        for server in servers.all
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    ]


@pytest.mark.parametrize("content", PROMPTS, ids=["short", "list", "repeated", "long"])
def test_the_greedy_text_is_the_same_in_both_modes(gateway, servers, content):
    answers = {mode: ask(gateway, mode, content) for mode in ("merged", "split")}
    assert [status for status, _, _ in answers.values()] == [200, 200], answers
    assert {mode: headers["x-cache-mode"] for mode, (_, headers, _) in answers.items()} == {
        "merged": "merged",
        "split": "split",
    }
    assert text_of(answers["split"][2]) == text_of(answers["merged"][2])
    assert text_of(answers["split"][2])


def test_kv_is_moved_by_nixl_and_cached_tokens_are_those_of_prefill(gateway, servers):
    salt = str(random.random())  # nobody has seen this prompt
    before = servers.decode.figure("vllm:nixl_bytes_transferred_sum")
    queries = servers.prefill.figure("vllm:prompt_tokens")
    status, headers, answer = ask(gateway, "split", f"{salt} " + "one two three four five six seven " * 40)
    assert status == 200, answer
    # vLLM publishes a transfer's figures with a later step: another request makes one.
    wait_until(
        lambda: ask(gateway, "split", "go on") and servers.decode.figure("vllm:nixl_bytes_transferred_sum") > before,
        "the decode server's NIXL counter rises",
    )
    assert servers.prefill.figure("vllm:prompt_tokens") > queries
    usage = answer["usage"]
    assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) < usage["prompt_tokens"] / 2
    assert headers["x-cache-instance"] == "prefill-0 + decode-0"
    assert servers.decode.figure("vllm:nixl_num_failed_transfers") == 0


def test_a_stream_in_split_has_its_legs_timed_apart(gateway, servers):
    _, headers, _ = ask(gateway, "split", "Count to five.", max_tokens=8)
    record = gateway.get(f"/v1/requests/{headers['x-request-id']}")
    assert record["timings"]["prefill_seconds"] > 0
    figures = gateway.get("/v1/engines")["upstreams"]["vllm"]
    by_name = {server["name"]: server for server in figures["servers"]}
    assert by_name["prefill-0"]["figures"]["prefix_query_tokens"] > 0
    assert figures["pairs"] == [{"prefill": "prefill-0", "decode": "decode-0", "checked": True, "problem": None}]


async def test_200_requests_with_random_aborts_leave_no_blocks_in_use(gateway, servers, session):
    chance = random.Random(7)
    places = asyncio.Semaphore(AT_ONCE)
    leaving = [chance.uniform(0, 4) if chance.random() < 0.5 else None for _ in range(NUM_ABORTED)]
    outcomes = await asyncio.gather(
        *(_maybe_leave(session, gateway.url, places, i, seconds) for i, seconds in enumerate(leaving))
    )
    assert outcomes.count("whole") > 20
    assert outcomes.count("left") > 20
    assert not [outcome for outcome in outcomes if outcome not in ("whole", "left")]
    # A prefill whose request never reached decode keeps its KV for the 30 s of its lease.
    await asyncio.to_thread(wait_until, lambda: not any(in_use(servers)), "no request and no block is left", 90)
    status, _, answer = await asyncio.to_thread(ask, gateway, "split", PROMPTS[0])
    assert status == 200, answer


async def _maybe_leave(
    session: aiohttp.ClientSession, url: str, places: asyncio.Semaphore, number: int, seconds: float | None
) -> str:
    """One request, left after some seconds; None stays to the end."""
    mode = "split" if number % 4 else "merged"
    fields = body(f"{number}: {PROMPTS[number % 4]}", stream=True, max_tokens=12)
    try:
        async with (
            places,
            asyncio.timeout(180 if seconds is None else seconds),
            session.post(f"{url}/v1/chat/completions", json=fields, headers={"X-Cache-Mode": mode}) as response,
        ):
            data = await response.read()
            is_whole = response.status == 200 and b"data: [DONE]" in data and b'"error"' not in data
            return "whole" if is_whole else f"failed {response.status} {data[:300]!r}"
    except TimeoutError:
        return "left"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_killing_a_side_is_an_error_in_time_and_its_restart_is_noticed(gateway, servers, session, side):
    server = getattr(servers, side)
    fields = body("Tell a long story about a river.", stream=True, max_tokens=600, ignore_eos=True, min_tokens=600)
    url, headers = f"{gateway.url}/v1/chat/completions", {"X-Cache-Mode": "split"}
    if side == "decode":
        async with session.post(url, json=fields, headers=headers) as response:
            await response.content.readany()  # it has begun
            await asyncio.to_thread(server.kill)
            async with asyncio.timeout(20):
                rest = await response.read()
        last = [line for line in rest.decode().splitlines() if line.startswith("data: ")][-1]
        assert "error" in json.loads(last.removeprefix("data: ")), last
    else:
        await asyncio.to_thread(server.kill)
    async with asyncio.timeout(20):
        async with session.post(url, json=body("hi"), headers=headers) as response:
            assert response.status in (502, 503), await response.read()
        async with session.post(url, json=body("hi"), headers={"X-Cache-Mode": "merged"}) as response:
            assert response.status == 200
    server.start()
    await asyncio.to_thread(server.wait_ready)
    await asyncio.to_thread(
        wait_until, lambda: ask(gateway, "split", PROMPTS[1])[0] == 200, f"split is served again by the new {side}", 60
    )
    answers = [await asyncio.to_thread(ask, gateway, mode, PROMPTS[1]) for mode in ("merged", "split")]
    assert text_of(answers[0][2]) == text_of(answers[1][2])
