"""A real vLLM pair behind the gateway: the same text in both modes, KV that moves, nothing left behind, recovery."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from typing import Any

import aiohttp
import pytest
from vllm_servers import VllmServer

from support.gateway_process import GatewayProcess, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPTS = [
    "Write one sentence about the sea.",
    "List three colours and three animals, one per line.",
    "Repeat after me: " + "alpha beta gamma delta " * 40,
    "Explain in two sentences why the sky is blue. " * 12,
]
NUM_ABORTED = 200
EDGES = (2, 15, 16, 17, 127, 128, 129, 257)  # lengths around the ends of blocks, which are 128 tokens on a CPU
NUM_LIKELY = 5
BF16_ROUNDING = 0.3  # of a log-probability: logits around 16 are multiples of 1/8
LONG = "alpha beta gamma delta " * 300  # takes a core a second or more
AT_ONCE = 24  # more would only wait: a core computes one or two of these prompts in a second


def body(content: str, **more: Any) -> dict[str, Any]:
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": content}]}
    return {**chat, "temperature": 0, "max_tokens": 24, **more}


def ask(gateway: GatewayProcess, mode: str, content: str, **more: Any) -> tuple[int, dict[str, str], Any]:
    return gateway.call("POST", "/v1/chat/completions", body(content, **more), {"X-Cache-Mode": mode})


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HELD = (*BUSY, "vllm:kv_cache_usage_perc")


def in_use(servers: list[VllmServer], names: tuple[str, ...] = HELD) -> list[float]:
    return [server.figure(name) for server in servers for name in names]


def hold_nothing(servers: list[VllmServer], names: tuple[str, ...] = HELD) -> bool:
    """Figures are published with steps: a server that seems to hold something is given one more."""
    holding = [server for server in servers if any(in_use([server], names))]
    for server in holding:
        server.step()
    return not holding


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


def test_pd_07_token_ids_of_any_length_find_the_same_next_token_in_both_modes(gateway, servers):
    """After random ids many tokens are nearly as likely, and bf16 decides between them by the number of rows."""
    for length in EDGES:
        merged, split = (_likely_next(gateway, mode, length) for mode in ("merged", "split"))
        both = merged.keys() & split.keys()
        assert len(both) > NUM_LIKELY / 2, (length, merged, split)
        assert max(abs(merged[token] - split[token]) for token in both) < BF16_ROUNDING, (length, merged, split)


def _likely_next(gateway: GatewayProcess, mode: str, length: int) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens after so many ids."""
    prompt = [1000 + 37 * i % 40_000 for i in range(length)]
    fields = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": NUM_LIKELY}
    status, headers, answer = gateway.call("POST", "/v1/completions", fields, {"X-Cache-Mode": mode})
    assert (status, headers["x-cache-mode"]) == (200, mode), answer
    assert answer["usage"]["prompt_tokens"] == length
    return dict(answer["choices"][0]["logprobs"]["top_logprobs"][0])


async def test_a_stream_gives_the_same_text_in_both_modes(gateway, servers, session):
    texts = {}
    for mode in ("merged", "split"):
        url, headers = f"{gateway.url}/v1/chat/completions", {"X-Cache-Mode": mode}
        fields = body(PROMPTS[3], stream=True, stream_options={"include_usage": True})
        async with session.post(url, json=fields, headers=headers) as response:
            data = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        texts[mode] = "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"])
        assert "kv_transfer_params" not in data
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert texts["split"] == texts["merged"]
    assert texts["split"]


def test_kv_is_moved_by_nixl_and_cached_tokens_are_those_of_prefill(gateway, servers):
    salt = str(random.random())  # nobody has seen this prompt
    before = servers.decode.figure("vllm:nixl_bytes_transferred_sum")
    num_before = servers.decode.figure("vllm:nixl_bytes_transferred_count")
    ask(gateway, "merged", f"{salt} merged moves nothing")
    assert servers.decode.figure("vllm:nixl_bytes_transferred_count") == num_before
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
    assert servers.decode.figure("vllm:nixl_bytes_transferred_count") > num_before
    # A server that was too busy for the gateway's last look is not asked for its figures before the next.
    told = wait_until(lambda: _figures(gateway, "decode-0"), "the gateway tells decode's figures")
    assert told["transferred_bytes"] > before


def _figures(gateway: GatewayProcess, name: str) -> dict[str, Any]:
    """What the gateway says that a server exports; nothing where it could not be asked."""
    servers = gateway.get("/v1/engines")["upstreams"]["vllm"]["servers"]
    return next((server["figures"] or {} for server in servers if server["name"] == name), {})


def test_a_stream_in_split_has_its_legs_timed_apart(gateway, servers):
    _, headers, _ = ask(gateway, "split", "Count to five.", max_tokens=8)
    record = gateway.get(f"/v1/requests/{headers['x-request-id']}")
    assert record["timings"]["prefill_seconds"] > 0
    told = wait_until(lambda: _figures(gateway, "prefill-0"), "the gateway tells prefill's figures")
    assert told["prefix_query_tokens"] > 0
    assert gateway.get("/v1/engines")["upstreams"]["vllm"]["pairs"] == [
        {"prefill": "prefill-0", "decode": "decode-0", "checked": True, "problem": None}
    ]


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
    await asyncio.to_thread(wait_until, lambda: hold_nothing(servers.all), "no request and no block is left", 90)
    assert await asyncio.to_thread(in_flight, gateway) == [0.0, 0.0]
    assert servers.decode.figure("vllm:nixl_num_failed_transfers") == 0
    status, _, answer = await asyncio.to_thread(ask, gateway, "split", PROMPTS[0])
    assert status == 200, answer


def in_flight(gateway: GatewayProcess) -> list[float]:
    """What the gateway itself still counts."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    names = (r"kvgate_requests_in_flight", r'kvgate_upstream_in_flight\{backend="vllm"\}')
    return [float(found[1]) for name in names if (found := re.search(rf"^{name} (\S+)$", text, re.M))]


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
    server, others = getattr(servers, side), [other for other in servers.all if other is not getattr(servers, side)]
    if side == "decode":
        await _kill_within_an_answer(gateway, server, session)
    else:
        await _kill_within_prefills(gateway, server, session)
    url, headers = f"{gateway.url}/v1/chat/completions", {"X-Cache-Mode": "split"}
    async with asyncio.timeout(20):
        async with session.post(url, json=body("hi"), headers=headers) as response:
            assert response.status in (502, 503), await response.read()
        async with session.post(url, json=body("hi"), headers={"X-Cache-Mode": "merged"}) as response:
            assert response.status == 200
    states = gateway.get("/ready")["targets"]["vllm"]["servers"]
    assert {one["name"]: one["state"] for one in states}[f"{side}-0"] == "down"
    # What the dead one was to fetch is given up by the living, at the latest when the lease of 30 s ends.
    names = HELD if side == "decode" else BUSY
    await asyncio.to_thread(wait_until, lambda: hold_nothing(others, names), "the others hold nothing for it", 120)
    server.start()
    await asyncio.to_thread(server.wait_ready)
    await asyncio.to_thread(
        wait_until, lambda: ask(gateway, "split", PROMPTS[1])[0] == 200, f"split is served again by the new {side}", 60
    )
    moved = servers.decode.figure("vllm:nixl_bytes_transferred_count")
    answers = [await asyncio.to_thread(ask, gateway, mode, PROMPTS[1]) for mode in ("merged", "split")]
    assert text_of(answers[0][2]) == text_of(answers[1][2])
    await asyncio.to_thread(
        wait_until,
        lambda: ask(gateway, "split", "go on") and servers.decode.figure("vllm:nixl_bytes_transferred_count") > moved,
        "KV moves again",
    )
    assert await asyncio.to_thread(in_flight, gateway) == [0.0, 0.0]


async def _kill_within_an_answer(gateway: GatewayProcess, server: VllmServer, session: aiohttp.ClientSession) -> None:
    """The stream ends with an error event, and with no end mark."""
    fields = body("Tell a long story about a river.", stream=True, max_tokens=600, ignore_eos=True, min_tokens=600)
    url, headers = f"{gateway.url}/v1/chat/completions", {"X-Cache-Mode": "split"}
    async with session.post(url, json=fields, headers=headers) as response:
        await response.content.readany()  # it has begun
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(20):
            rest = await response.read()
    last = [line for line in rest.decode().splitlines() if line.startswith("data: ")][-1]
    assert "error" in json.loads(last.removeprefix("data: ")), last


async def _kill_within_prefills(gateway: GatewayProcess, server: VllmServer, session: aiohttp.ClientSession) -> None:
    """Of prompts that are being computed each ends in time, and those that the server had with an error."""
    asking = [asyncio.create_task(_outcome(gateway, session, f"{random.random()} {LONG}")) for _ in range(8)]
    await asyncio.to_thread(wait_until, lambda: any(in_use([server], BUSY)), "prompts are being computed")
    await asyncio.to_thread(server.kill)
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*asking)
    assert not [outcome for outcome in outcomes if outcome not in ("whole", "error")], outcomes
    assert "error" in outcomes


async def _outcome(gateway: GatewayProcess, session: aiohttp.ClientSession, content: str) -> str:
    url, headers = f"{gateway.url}/v1/chat/completions", {"X-Cache-Mode": "split"}
    async with session.post(url, json=body(content, stream=True, max_tokens=4), headers=headers) as response:
        data = await response.read()
    if b'"error"' in data and b"[DONE]" not in data:
        return "error"
    is_whole = response.status == 200 and b"data: [DONE]" in data
    return "whole" if is_whole else f"{response.status} {data[-300:]!r}"
