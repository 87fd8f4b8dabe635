"""Each real client reads a file by a tool of its own, as a scripted upstream told it to, and gets told what is in it.

The upstream speaks chat completions alone, so this goes through each client's own API in both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.programs import PROGRAMS, connect, program, run_program
from clients.tool_upstream import ToolUpstream, running_upstream
from support.gateway_process import GatewayProcess, running_gateway

WORD = "MARIGOLD-4711"
SETTINGS = """
[[targets]]
name = "scripted"
base_url = "{url}"
"""


@pytest.fixture
def note(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "note.txt").write_text(f"The word is {WORD}\n")
    return folder / "note.txt"


@pytest.fixture
async def upstream(note: Path) -> AsyncIterator[ToolUpstream]:
    async with running_upstream(str(note)) as running:
        yield running


@pytest.fixture
async def gateway(upstream: ToolUpstream, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    settings = tmp_path / "settings"
    settings.mkdir()
    serving = running_gateway(SETTINGS.format(url=upstream.url), settings)
    running = await asyncio.to_thread(serving.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(serving.__exit__, None, None, None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
async def test_a_tool_call_goes_round(
    name: str, gateway: GatewayProcess, upstream: ToolUpstream, note: Path, tmp_path: Path
):
    client = program(name)
    home = tmp_path / "home"
    home.mkdir()
    await asyncio.to_thread(connect, name, home, url=gateway.url, model="scripted", mode="split")

    prompt = "Read note.txt and tell me the word in it"
    answer = await run_program(client, prompt, home=home, folder=note.parent, model="scripted")

    assert WORD in answer
    results = [m for body in upstream.requests for m in body["messages"] if m.get("role") == "tool"]
    assert any(WORD in str(message["content"]) for message in results)
    assert {mode for mode in upstream.modes if mode} == {"split"}
