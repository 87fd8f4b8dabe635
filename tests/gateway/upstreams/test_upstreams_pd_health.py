"""When a server of a pair counts as down: what a look at it finds, and what a request finds out."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.http_clients import HttpClients
from gateway.upstreams.pd_facts import ServerFacts
from gateway.upstreams.pd_servers import MAX_SILENT, Servers


class ScriptedProbe:
    """Answers each look at prefill-0 as told; every other server is healthy."""

    def __init__(self, *told: bool | None) -> None:
        self.told = list(told)
        self.num_asked = 0

    async def is_healthy(self, root: str) -> bool | None:
        return self.told.pop(0) if root.endswith("/p") and self.told else True

    async def facts(self, root: str, *, is_prefill: bool) -> ServerFacts:
        self.num_asked += 1
        await asyncio.sleep(0)
        return ServerFacts(version=root)


def servers_with(probe: ScriptedProbe) -> Servers:
    timeouts: Any = TimeoutSettings()
    settings = PairSettings(name="x", engine="vllm", prefill=("http://h/p",), decode=("http://h/d",))
    return Servers(settings, HttpClients(timeouts), timeouts, "hop", probe)  # type: ignore[arg-type]


async def states_after_looks(*told: bool | None) -> list[str]:
    probe = ScriptedProbe(*told)
    servers = servers_with(probe)
    found: list[str] = []
    looked = asyncio.Event()

    def on_change() -> None:
        found.append(servers.reports()[0].state)
        if probe.told:
            servers.look_soon()
        else:
            looked.set()

    watch = asyncio.create_task(servers.watch(on_change))
    async with asyncio.timeout(10):
        await looked.wait()
    watch.cancel()
    return found


async def test_a_server_that_refuses_is_down_at_once_and_up_as_soon_as_it_says_so():
    assert await states_after_looks(True, False, False, True) == ["up", "down", "down", "up"]


async def test_a_server_that_is_slow_to_answer_stays_up_for_a_while():
    silence: list[bool | None] = [None] * MAX_SILENT
    assert await states_after_looks(True, *silence) == ["up"] * MAX_SILENT + ["down"]
    assert await states_after_looks(True, *silence[1:], True, None) == ["up"] * (MAX_SILENT + 2)


async def test_a_server_that_has_come_back_is_another_process_with_facts_of_its_own():
    probe = ScriptedProbe()
    servers = servers_with(probe)
    server = servers.of("prefill")[0]
    await asyncio.gather(*(servers.learn(server) for _ in range(5)))
    assert (probe.num_asked, server.instance) == (1, ("prefill-0", 0))
    servers.mark_down(server, "refused")
    assert servers.usable("prefill") == []
    watch = asyncio.create_task(servers.watch(lambda: None))
    async with asyncio.timeout(10):
        while not servers.usable("prefill"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    watch.cancel()
    assert (server.instance, server.facts) == (("prefill-0", 1), None)
