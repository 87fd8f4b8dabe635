"""Which servers of a pair take requests, whatever comes in whatever order: by prefix, load and room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import ModeUnavailable, UpstreamTimeout
from gateway.core.types import SIDES, Side
from gateway.routing.instance_choice import RUNNING_CHARACTERS, InstanceChoice
from gateway.routing.prompt_prefix import PIECE_CHARACTERS
from gateway.routing.server_breaker import ServerBreaker
from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.pd.admission import Admission, Slot
from gateway.upstreams.pd.bodies import split_fields
from gateway.upstreams.pd.choice import choice_request
from gateway.upstreams.pd.facts import ServerFacts
from gateway.upstreams.pd.job import Hold, Job
from gateway.upstreams.pd.legs import LegFailed
from gateway.upstreams.pd.picking import Picker
from gateway.upstreams.pd.server import Server
from gateway.upstreams.pd.servers import Servers

NUM_SERVERS = 3
MAX_RUNNING = 2
MAX_WAITING = 4
MAX_PREFIXES = 24
KNOWN_CHARACTERS = 3000 // PIECE_CHARACTERS * PIECE_CHARACTERS  # that the turns of one `job` have in common


def job(prefix: int, turn: int = 0) -> Job:
    text = f"{prefix} " * 1500 + f"turn {turn}"
    body = b'{"model": "m", "prompt": "%s"}' % text.encode()
    request = RawRequest("/completions", body, {}, stream=True)
    fields = split_fields(body)
    return Job(request, fields, choice_request(fields, "r", None))


class Mute:
    """Gives no server's facts in time."""

    async def facts(self, root: str, *, is_prefill: bool) -> ServerFacts:
        raise UpstreamTimeout(f"{root} gave no answer")


@dataclass
class Replicas:
    """Merged or decode servers as a pair has them, and the requests that are at them or wait."""

    side: Side = "merged"
    max_running: int | None = MAX_RUNNING
    max_prefixes: int = 10_000
    inside: list[tuple[Server, Hold]] = field(default_factory=list)
    waiting: list[asyncio.Task[tuple[Server, Slot, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = InstanceChoice(max_prefixes=self.max_prefixes)
        urls = tuple(f"http://h{i}" for i in range(NUM_SERVERS))
        both = {"prefill": ("http://p",), "decode": urls} if self.side == "decode" else {"merged": urls}
        timeouts, clients = TimeoutSettings(), HttpClients(TimeoutSettings())
        pair = PairSettings(name="x", engine="vllm", **both)
        probe: Any = Mute()
        self.servers = Servers(pair, clients, timeouts, "hop", probe, make_breaker=lambda: ServerBreaker(2, 30.0))
        limits = {"max_running": self.max_running, "max_waiting": MAX_WAITING, "timeout_seconds": 60.0}
        self.admission = Admission(self.side, **limits)  # type: ignore[arg-type]
        choosers = dict.fromkeys(SIDES, self.chooser)
        self.picker = Picker("x", self.servers, {self.side: self.admission}, choosers)

    @property
    def all(self) -> list[Server]:
        return list(self.servers.of(self.side))

    async def ask(self, asked: Job) -> None:
        self.waiting.append(asyncio.create_task(self.picker.place(asked, self.side)))
        await self.settle()

    async def served(self, asked: Job) -> Server:
        """A request that is over at once."""
        server, slot, assignment = await self.picker.place(asked, self.side)
        Hold(slot, assignment).release()
        return server

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled() and task.exception() is None:
                server, slot, assignment = task.result()
                self.inside.append((server, Hold(slot, assignment)))

    async def step(self, what: str, which: int) -> None:
        if what == "ask":
            await self.ask(job(which % 7, which))
        elif what == "first token" and self.inside:
            self.inside[which % len(self.inside)][1].decoding.first_token()
        elif what == "end" and self.inside:
            self.inside.pop(which % len(self.inside))[1].release()
        elif what == "abort" and self.waiting:
            self.waiting[which % len(self.waiting)].cancel()
        elif what == "end, and its heir leaves" and self.inside and self.waiting:
            self.inside.pop(which % len(self.inside))[1].release()
            self.waiting[0].cancel()  # in the moment in which it was given the place
        elif what == "die":
            self.servers.mark_down(self.all[which % NUM_SERVERS], "scripted")
        elif what == "come back":
            self.revive(self.all[which % NUM_SERVERS])
        await self.settle()

    def revive(self, server: Server) -> None:
        if server.is_up is False:
            server.is_up, server.process = True, server.process + 1
        self.picker.serve_waiting()

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        await self.settle()
        for _, hold in self.inside:
            hold.release()
            hold.release()  # does nothing more


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "first token", "end", "end, and its heir leaves", "abort", "die", "come back"]
        ),
        st.integers(0, 99),
    ),
    max_size=60,
)


@pytest.mark.parametrize("side", ["merged", "decode"])
@given(steps=STEPS)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_no_server_has_more_than_it_may_a_dead_one_gets_nothing_and_all_is_given_back(side, steps):
    async def play() -> None:
        it = Replicas(side, max_prefixes=MAX_PREFIXES)
        for what, which in steps:
            dead = {server.name for server in it.all if server.is_up is False}
            before = {id(hold) for _, hold in it.inside}
            await it.step(what, which)
            came = [server for server, hold in it.inside if id(hold) not in before]
            if what not in ("come back", "die"):
                assert not {server.name for server in came} & dead
            running = {server.name: sum(one is server for one, _ in it.inside) for server in it.all}
            assert max(running.values()) <= MAX_RUNNING
            assert {name: it.admission.num_running(name) for name in running} == running
            assert it.admission.num_waiting <= MAX_WAITING
            assert len(it.chooser._holders) <= MAX_PREFIXES
        await it.end()
        assert [it.admission.num_running(server.name) for server in it.all] == [0] * NUM_SERVERS
        assert it.admission.num_waiting == 0
        loads = it.chooser._loads.values()
        assert {(load.num_running, load.prompt_characters) for load in loads} <= {(0, 0)}

    asyncio.run(play())


@given(prefixes=st.lists(st.integers(0, 4), min_size=1, max_size=30))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_one_prefix_goes_to_one_server_for_as_long_as_nothing_else_is_there(prefixes):
    async def play() -> None:
        it = Replicas()
        homes: dict[int, str] = {}
        for turn, prefix in enumerate(prefixes):
            server = await it.served(job(prefix, turn))
            assert homes.setdefault(prefix, server.name) == server.name

    asyncio.run(play())


@given(busy=st.integers(0, 30))
@settings(max_examples=31, derandomize=True, deadline=None)
def test_a_prefix_leaves_its_server_only_when_that_is_full_or_has_more_to_do_than_it_saves(busy):
    async def play() -> None:
        it = Replicas(max_running=None)
        home = await it.served(job(1))
        for number in range(busy):  # running requests elsewhere known to nobody, all at this one
            assignment = it.chooser.choose([home.instance], job(100 + number).ask)
            assignment.first_token()
        server = await it.served(job(1, turn=2))
        saves = KNOWN_CHARACTERS
        assert (server is home) is (busy * RUNNING_CHARACTERS <= saves)

    asyncio.run(play())


async def test_a_prefix_goes_elsewhere_while_its_server_is_full_and_comes_back():
    it = Replicas()
    home = await it.served(job(1))
    for turn in range(MAX_RUNNING):
        await it.ask(job(1, turn))
        it.inside[-1][1].decoding.first_token()
    assert [server for server, _ in it.inside] == [home] * MAX_RUNNING
    other = await it.served(job(1, 9))
    assert other is not home
    for _, hold in it.inside:
        hold.release()
    assert await it.served(job(1, 10)) in (home, other)  # both know it now
    assert await it.served(job(1, 1)) is home


async def test_a_dead_server_s_prefixes_go_to_another_and_its_next_life_knows_nothing():
    it = Replicas()
    home = await it.served(job(1))
    it.servers.mark_down(home, "scripted")
    heir = await it.served(job(1))
    assert heir is not home
    it.revive(home)
    assert await it.served(job(1)) is heir


async def test_without_a_limit_of_its_own_a_merged_server_takes_what_comes():
    it = Replicas(max_running=None)
    for i in range(50):
        await it.ask(job(i))
    assert len(it.inside) == 50
    running = [sum(one is server for one, _ in it.inside) for server in it.all]
    assert max(running) - min(running) <= 1
    await it.end()


async def test_when_the_last_server_dies_those_who_wait_are_told():
    it = Replicas()
    for i in range(NUM_SERVERS * MAX_RUNNING + 1):
        await it.ask(job(i))
    (task,) = it.waiting
    for server in it.all:
        it.servers.mark_down(server, "scripted")
    it.picker.serve_waiting()
    with pytest.raises(ModeUnavailable, match="No merged server"):
        await task
    await it.end()


async def test_a_server_that_does_not_say_who_it_is_was_not_asked_the_request():
    replicas = Replicas(side="decode")
    with pytest.raises(LegFailed) as failed:
        await replicas.picker.prefill(job(1), replicas.all[0])
    assert (failed.value.server.name, failed.value.was_asked) == ("prefill-0", False)
    assert not LegFailed(replicas.all[0], UpstreamTimeout("silent")).took_no_connection
