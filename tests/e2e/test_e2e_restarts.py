"""An engine that is killed before the first token: its requests are answered once it is back, and say so."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
from test_e2e_modes import chat

from support.gateway_process import GatewayProcess, StartGateway
from support.sse import Answer, read_stream

# A start may take long while other tests run; what is tested is that it is waited for.
PATIENT = """
[retry]
max_retry_after_seconds = 60
deadline_seconds = 60
"""
MODE_OF_ROLE = {"merged": "merged", "decode": "split", "prefill": "split"}


async def ask_and_kill(session: aiohttp.ClientSession, gateway: GatewayProcess, role: str) -> tuple[Answer, Answer]:
    """A request that a stopped process holds when it is killed, and one that comes right after."""
    headers, url = {"X-Cache-Mode": MODE_OF_ROLE[role]}, gateway.url + "/v1/chat/completions"
    pid = (await asyncio.to_thread(gateway.engine_pids))[role]
    os.kill(pid, signal.SIGSTOP)
    held = asyncio.create_task(read_stream(session, url, chat("held", max_tokens=4), headers))
    async with session.get(gateway.url + "/health") as health:  # the gateway has had time to read the other one
        assert health.status == 200
    os.kill(pid, signal.SIGKILL)
    late = await read_stream(session, url, chat("late", max_tokens=4), headers)
    return await held, late


async def test_requests_without_a_token_survive_the_death_of_any_engine(
    session: aiohttp.ClientSession, start_gateway: StartGateway
):
    with start_gateway(extra=PATIENT) as gateway:
        await asyncio.to_thread(gateway.wait_ready)
        for role in MODE_OF_ROLE:
            for answer in await ask_and_kill(session, gateway, role):
                assert answer.status == 200, answer.body
                assert answer.done
                assert answer.error is None
            await asyncio.to_thread(gateway.wait_ready)
        records = (await asyncio.to_thread(gateway.get, "/v1/requests?limit=6"))["requests"]

        assert {record["outcome"] for record in records} == {"ok"}
        seen = [[attempt["outcome"] for attempt in record["attempts"]] for record in records]
        assert any("restarting" in attempts for attempts in seen)
        assert all(attempts[-1] == "ok" and len(attempts) <= 4 for attempts in seen), seen
        assert not any((await asyncio.to_thread(gateway.blocks_in_use)).values())
