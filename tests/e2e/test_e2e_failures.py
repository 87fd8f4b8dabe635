"""Processes that die, and input that is wrong: clear errors, nothing left behind, the next request works."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from test_e2e_modes import LONG, ask, chat, leave_after_first_text

from support.gateway_process import GatewayProcess, StartGateway, descendants, is_alive, wait_until
from support.sse import Answer, read_stream


async def first_text(session: aiohttp.ClientSession, gateway: GatewayProcess, mode: str, seen: asyncio.Event) -> Answer:
    """Start a long answer; sets `seen` at its first text and returns all of it."""
    body = chat("of every token that a model has read", max_tokens=LONG)
    async with session.post(
        gateway.url + "/v1/chat/completions", json=body, headers={"X-Cache-Mode": mode}
    ) as response:
        answer = Answer(response.status, {})
        buffer = b""
        async for chunk in response.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                answer.take_line(line.decode())
            if answer.text:
                seen.set()
        return answer


@pytest.mark.parametrize(
    ("role", "broken", "untouched"), [("merged", "merged", "split"), ("decode", "split", "merged")]
)
async def test_a_killed_engine_ends_its_streams_with_an_error_and_comes_back(
    session: aiohttp.ClientSession, start_gateway: StartGateway, role: str, broken: str, untouched: str
):
    with start_gateway() as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        seen = asyncio.Event()
        stream = asyncio.create_task(first_text(session, gateway, broken, seen))
        await asyncio.wait_for(seen.wait(), 30)
        pids = await asyncio.to_thread(gateway.engine_pids)

        os.kill(pids[role], signal.SIGKILL)
        answer = await asyncio.wait_for(stream, 10)
        other = await ask(session, gateway, chat("still here", max_tokens=4), untouched)

        assert answer.error is not None
        assert not answer.done
        assert answer.finish_reason is None
        assert other.done
        await asyncio.to_thread(gateway.wait_ready)
        assert (await ask(session, gateway, chat("back again", max_tokens=4), broken)).done
        assert (await asyncio.to_thread(gateway.engine_pids))[role] != pids[role]
        assert not any((await asyncio.to_thread(gateway.blocks_in_use)).values())


async def test_a_killed_prefill_side_fails_only_what_it_was_computing(
    session: aiohttp.ClientSession, start_gateway: StartGateway
):
    with start_gateway() as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        seen = asyncio.Event()
        decoding = asyncio.create_task(first_text(session, gateway, "split", seen))
        await asyncio.wait_for(seen.wait(), 30)
        pids = await asyncio.to_thread(gateway.engine_pids)

        os.kill(pids["prefill"], signal.SIGKILL)
        answer = await asyncio.wait_for(decoding, 60)

        assert answer.done  # its KV had already moved
        assert answer.finish_reason == "length"
        await asyncio.to_thread(gateway.wait_ready)
        assert (await ask(session, gateway, chat("back again", max_tokens=4), "split")).done


async def test_lc_03_a_killed_gateway_leaves_no_process_and_no_shared_memory(
    session: aiohttp.ClientSession, start_gateway: StartGateway
):
    before = set(Path("/dev/shm").iterdir())
    with start_gateway() as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        await leave_after_first_text(session, gateway, "split")
        children = descendants(gateway.process.pid)
        assert len(children) >= 3

        gateway.process.kill()
        await asyncio.to_thread(
            wait_until, lambda: not any(map(is_alive, children)), "every engine process is gone", 10
        )

    assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_lc_03_a_stopped_gateway_ends_cleanly_and_no_thread_keeps_it(
    session: aiohttp.ClientSession, start_gateway: StartGateway, number: signal.Signals
):
    before = set(Path("/dev/shm").iterdir())
    with start_gateway() as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        assert (await ask(session, gateway, chat("x", max_tokens=2), "split")).done  # every thread there is has begun
        children = descendants(gateway.process.pid)
        assert len(children) >= 3

        gateway.process.send_signal(number)

        assert await asyncio.to_thread(gateway.process.wait, 30) == 0
        assert not any(map(is_alive, children))
    assert set(Path("/dev/shm").iterdir()) <= before


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}
            ]
        },
        "content",
    ),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "role"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop": [1]}, "stop"),
    ({"n": 0}, "n"),
    ({"cacheStrategy": {"mode": "both"}}, "cacheStrategy"),
    ({"cacheStrategy": {"chunkSize": "big"}}, "chunkSize"),
    ({"cacheStrategy": {"chunksize": 512}}, "chunksize"),
]


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize(("fields", "named"), BAD_CHAT)
def test_a_bad_field_is_a_400_that_names_it(gateway: GatewayProcess, mode: str, fields: dict[str, object], named: str):
    status, _, body = gateway.call("POST", "/v1/chat/completions", {**chat("x"), **fields}, {"X-Cache-Mode": mode})

    assert status == 400
    assert named in body["error"]["message"] or named in (body["error"]["param"] or "")
    assert gateway.call("POST", "/v1/chat/completions", {**chat("x", max_tokens=1)}, {"X-Cache-Mode": mode})[0] == 200


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"3", b'"x"', b"{", b'{"a":\xff}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(gateway: GatewayProcess, data: bytes):
    status, headers, body = gateway.call("POST", "/v1/chat/completions", data)

    assert status == 400
    assert headers["content-type"].startswith("application/json")
    assert body["error"]["message"]


def test_an_unknown_model_is_a_404_with_the_list(gateway: GatewayProcess):
    status, _, body = gateway.call("POST", "/v1/chat/completions", {**chat("x"), "model": "nobody"})

    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert "tiny" in body["error"]["message"]


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_a_prompt_beyond_the_context_is_refused_and_max_tokens_is_clamped(gateway: GatewayProcess, mode: str):
    long = {"model": "tiny", "prompt": [5] * 5000, "max_tokens": 4}
    status, _, body = gateway.call("POST", "/v1/completions", long, {"X-Cache-Mode": mode})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    clamped = {"model": "tiny", "prompt": [5] * 4080, "max_tokens": 32000, "temperature": 0, "ignore_eos": True}
    status, headers, body = gateway.call("POST", "/v1/completions", clamped, {"X-Cache-Mode": mode})
    assert status == 200
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert "max_tokens" in headers["x-kvgate-notice"]


def test_a_body_of_30_mb_gets_a_clear_answer(gateway: GatewayProcess):
    status, _, body = gateway.call("POST", "/v1/chat/completions", chat("word " * 6_000_000))

    assert status in (400, 413)
    assert body["error"]["code"] in ("context_length_exceeded", "request_too_large")
    assert gateway.call("POST", "/v1/chat/completions", chat("x", max_tokens=1))[0] == 200


@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_a_prompt_that_can_never_fit_the_pool_is_refused_by_size(start_gateway: StartGateway, mode: str):
    with start_gateway(num_kv_blocks=64) as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        status, _, body = await asyncio.to_thread(
            gateway.call,
            "POST",
            "/v1/completions",
            {"model": "tiny", "prompt": [5] * 1100, "max_tokens": 4},
            {"X-Cache-Mode": mode},
        )
        assert status == 400
        assert "1024" in body["error"]["message"]
        small = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 4}
        assert (await asyncio.to_thread(gateway.call, "POST", "/v1/completions", small, {"X-Cache-Mode": mode}))[
            0
        ] == 200


async def test_an_explicit_bad_mode_names_the_channel(session: aiohttp.ClientSession, gateway: GatewayProcess):
    answer = await read_stream(session, gateway.url + "/v1/chat/completions", chat("x"), {"X-Cache-Mode": "both"})

    assert answer.status == 400
    assert "X-Cache-Mode" in answer.body["error"]["message"]
    assert "merged" in answer.body["error"]["message"]
    assert "split" in answer.body["error"]["message"]
