"""When a server of a pair counts as down: what a look at it finds, and what a request finds out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.core.errors import UpstreamTimeout
from gateway.routing.server_breaker import ServerBreaker
from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.pd.facts import ServerFacts
from gateway.upstreams.pd.figures import PdFigures, Scraped
from gateway.upstreams.pd.plans import DataRank
from gateway.upstreams.pd.servers import MAX_SILENT, Servers
from support.waiting import until


class ScriptedProbe:
    """Answers each look at prefill-0 as told; every other server is healthy."""

    def __init__(self, *told: bool | None) -> None:
        self.told = list(told)
        self.num_asked = 0
        self.is_mute = False  # gives no facts in time
        self.engine_id = ""  # of Mooncake
        self.scraped: list[str] = []

    async def is_healthy(self, root: str) -> bool | None:
        return self.told.pop(0) if root.endswith("/p") and self.told else True

    async def facts(self, root: str, *, is_prefill: bool) -> ServerFacts:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.is_mute:
            raise UpstreamTimeout(f"{root} gave no answer")
        return ServerFacts(version=root, ranks=await self.ranks(root) if is_prefill else ())

    async def ranks(self, root: str) -> tuple[DataRank, ...]:
        return (DataRank("0", self.engine_id),) if self.engine_id else ()

    async def figures(self, root: str) -> Scraped:
        self.scraped.append(root)
        return Scraped(PdFigures(num_running=1.0))


def servers_with(probe: ScriptedProbe, *more_prefill: str) -> Servers:
    timeouts: Any = TimeoutSettings()
    prefill = ("http://h/p", *more_prefill)
    settings = PairSettings(name="x", engine="vllm", prefill=prefill, decode=("http://h/d",))
    scripted: Any = probe
    breaker = {"make_breaker": lambda: ServerBreaker(1, 30.0)}
    return Servers(settings, HttpClients(timeouts), timeouts, "hop", scripted, **breaker)


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
    await until(lambda: servers.usable("prefill"), "it is used again")
    watch.cancel()
    assert (server.instance, server.facts) == (("prefill-0", 1), None)


async def one_look(servers: Servers) -> None:
    looked = asyncio.Event()
    watch = asyncio.create_task(servers.watch(looked.set))
    async with asyncio.timeout(10):
        await looked.wait()
    watch.cancel()


def names(servers: Servers) -> list[str]:
    return [server.name for server in servers.usable("prefill")]


async def test_a_silent_server_is_used_only_while_there_is_no_other():
    servers = servers_with(ScriptedProbe(None, None, True), "http://h/other")
    assert names(servers) == ["prefill-0", "prefill-1"]
    await one_look(servers)
    assert names(servers) == ["prefill-1"]
    servers.mark_down(servers.named("prefill-1"), "refused")
    assert names(servers) == ["prefill-0"]
    await one_look(servers)
    await one_look(servers)
    assert names(servers) == ["prefill-0", "prefill-1"]


async def test_those_who_wait_to_learn_of_a_hung_server_give_up_with_the_first():
    probe = ScriptedProbe()
    servers, probe.is_mute = servers_with(probe), True
    server = servers.named("prefill-0")
    found = await asyncio.gather(*(servers.learn(server) for _ in range(5)), return_exceptions=True)
    assert (probe.num_asked, {type(error) for error in found}) == (1, {UpstreamTimeout})
    with pytest.raises(UpstreamTimeout):
        await servers.learn(server)  # whoever comes later asks again
    probe.is_mute = False
    await servers.learn(server)
    assert (probe.num_asked, server.facts is not None) == (3, True)


async def test_a_mooncake_server_that_came_back_between_two_looks_is_another_process():
    probe = ScriptedProbe()
    servers, probe.engine_id = servers_with(probe), "first"
    server = servers.named("prefill-0")
    await one_look(servers)
    await servers.learn(server)
    await one_look(servers)
    assert (server.process, server.facts is not None) == (0, True)
    probe.engine_id = ""  # its bootstrap service isn't ready: that says nothing
    await one_look(servers)
    assert server.process == 0
    probe.engine_id = "second"
    await one_look(servers)
    assert (server.process, server.facts) == (1, None)


async def test_nobody_waits_for_the_figures_of_servers_that_do_not_answer():
    probe = ScriptedProbe(None)
    servers = servers_with(probe, "http://h/other")
    await one_look(servers)
    servers.mark_down(servers.named("prefill-1"), "refused")
    found = await servers.figures()
    assert probe.scraped == ["http://h/d"]
    assert {name: scraped.missing for name, scraped in found.items()} == {
        "prefill-0": "not asked: the server gave no answer to GET /health in time",
        "prefill-1": "not asked: the server is down",
        "decode-0": None,
    }


async def test_a_pair_is_one_of_servers_that_are_up_and_fit():
    servers = servers_with(ScriptedProbe())  # each says another version
    assert servers.has_pair()  # nobody has asked yet
    for name in ("prefill-0", "decode-0"):
        await servers.learn(servers.named(name))
    assert not servers.has_pair()
