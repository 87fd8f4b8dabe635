"""Which servers of a pair are left alone for what failed there, and that none is for another one's fault for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import GatewayError, TargetUnavailable, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.types import SIDES
from gateway.routing.instance_choice import InstanceChoice
from gateway.routing.server_breaker import ServerBreaker
from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.pd.admission import Admission
from gateway.upstreams.pd.blame import Suspicions
from gateway.upstreams.pd.bodies import split_fields
from gateway.upstreams.pd.choice import choice_request
from gateway.upstreams.pd.job import Hold, Job
from gateway.upstreams.pd.judging import Judge
from gateway.upstreams.pd.legs import LegFailed
from gateway.upstreams.pd.picking import Picker
from gateway.upstreams.pd.server import Server
from gateway.upstreams.pd.servers import Servers

NUM_SERVERS = 3
MAX_FAILURES = 2
OPEN_SECONDS = 30.0

# ----------------------------------------------------------------------------------------------- whose fault it may be


def test_who_fails_with_two_partners_is_at_fault_and_they_are_not():
    suspicions = Suspicions(is_sole=False)
    assert suspicions.failed_together("prefill-0", "decode-0") == set()
    assert suspicions.failed_together("prefill-0", "decode-1") == {"prefill-0"}


def test_who_fails_with_one_that_works_with_others_is_at_fault():
    suspicions = Suspicions(is_sole=False)
    suspicions.worked_together("prefill-0", "decode-1")  # before: says nothing of now
    assert suspicions.failed_together("prefill-0", "decode-0") == set()
    suspicions.worked_together("prefill-0", "decode-1")
    assert suspicions.failed_together("prefill-0", "decode-0") == {"decode-0"}


def test_the_only_two_are_told_of_it_both():
    assert Suspicions(is_sole=True).failed_together("p", "d") == {"p", "d"}


def test_two_that_failed_together_are_better_apart_until_one_of_them_has_worked():
    suspicions = Suspicions(is_sole=False)
    suspicions.failed_together("p0", "d0")
    assert suspicions.better_apart(["d0", "d1"], {"p0"}) == {"d0"}
    assert suspicions.better_apart(["d0", "d1"], {"p0", "p1"}) == set()
    assert suspicions.better_apart(["p0", "p1"], {"d0"}) == {"p0"}
    suspicions.worked_together("p0", "d1")
    assert suspicions.better_apart(["d0", "d1"], {"p0"}) == set()
    assert suspicions.failed_together("p0", "d0") == {"d0"}


def test_of_those_that_all_failed_with_one_the_first_is_tried_again():
    suspicions = Suspicions(is_sole=False)
    names = ["d0", "d1", "d2"]
    for name in (*names, *names):
        suspicions.failed_together("p0", name)
    tried = []
    for _ in range(6):
        (chosen,) = set(names) - suspicions.better_apart(names, {"p0"})
        suspicions.failed_together("p0", chosen)
        tried.append(chosen)
    assert tried == [*names, *names]


@given(ill=st.integers(0, 5), pairs=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=60))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_while_one_server_is_ill_only_that_one_is_ever_told_of_it(ill, pairs):
    suspicions = Suspicions(is_sole=False)
    names = [*(f"prefill-{i}" for i in range(3)), *(f"decode-{i}" for i in range(3))]
    for prefill, decode in ((f"prefill-{p}", f"decode-{d}") for p, d in pairs):
        if names[ill] in (prefill, decode):
            assert suspicions.failed_together(prefill, decode) <= {names[ill]}
        else:
            suspicions.worked_together(prefill, decode)


# ---------------------------------------------------------------------------------------------------------- the choice


def job(failed_at: frozenset[str] = frozenset()) -> Job:
    body = b'{"model": "m", "prompt": "one and the same"}'
    request = RawRequest("/completions", body, {}, stream=True, failed_at=set(failed_at))
    fields = split_fields(body)
    return Job(request, fields, choice_request(fields, "r", None))


@dataclass
class Replicas:
    """Merged servers, a clock of their breakers, and the requests that are at them."""

    now: float = 0.0
    inside: list[tuple[Server, Hold]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pair = PairSettings(name="x", engine="vllm", merged=tuple(f"http://h{i}" for i in range(NUM_SERVERS)))
        timeouts, probe = TimeoutSettings(), None
        nobody: Any = probe
        self.servers = Servers(pair, HttpClients(timeouts), timeouts, "hop", nobody, make_breaker=self.breaker)
        self.admission = Admission("merged", max_running=None, max_waiting=4, timeout_seconds=60.0)
        self.judge = Judge(is_sole=False)
        choosers = {side: InstanceChoice() for side in SIDES}
        self.picker = Picker("x", self.servers, {"merged": self.admission}, choosers)

    def breaker(self) -> ServerBreaker:
        return ServerBreaker(MAX_FAILURES, OPEN_SECONDS, clock=lambda: self.now)

    @property
    def all(self) -> list[Server]:
        return list(self.servers.of("merged"))

    async def ask(self, asked: Job | None = None) -> Server:
        server, slot, stay = await self.picker.place(asked or job(), "merged")
        self.inside.append((server, Hold(slot, stay)))
        return server

    def end(self, which: int, error: GatewayError | None, *, is_left: bool = False) -> None:
        server, hold = self.inside.pop(which % len(self.inside))
        if error is not None:
            self.judge.failed(LegFailed(server, error), job(), hold)
        elif not is_left:
            self.judge.worked(hold)
        hold.release()

    async def fail(self, times: int, name: str) -> None:
        """Requests that go to this server and fail there."""
        only = frozenset(server.name for server in self.all if server.name != name)
        for _ in range(times):
            assert (await self.ask(job(only))).name == name
            self.end(-1, UpstreamGone("x"))


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "retry", "well", "fail", "busy", "abort", "wait"]), st.integers(0, 99)),
    max_size=80,
)


async def play(it: Replicas, what: str, which: int) -> None:
    if what in ("ask", "retry"):
        failed_at = frozenset({it.all[which % NUM_SERVERS].name} if what == "retry" else ())
        states = {server.name: str(server.breaker.state) for server in it.all}
        waits = {server.name: server.breaker.wait_seconds() for server in it.all}
        well = {name for name, state in states.items() if state == "closed"}
        if min(waits.values()) > 0:
            assert not well
            with pytest.raises(TargetUnavailable) as refused:
                await it.ask(job(failed_at))
            assert refused.value.retry_after_seconds == max(1.0, min(waits.values()))
            return
        chosen = await it.ask(job(failed_at))
        assert waits[chosen.name] == 0, "one that is left alone was asked"
        if failed_at and well - failed_at:
            assert chosen.name in well - failed_at
    elif what == "wait":
        it.now += which % 3 * OPEN_SECONDS / 2
    elif it.inside:
        errors = {"fail": UpstreamError("x", status=500), "busy": UpstreamError("x", status=429)}
        it.end(which, errors.get(what), is_left=what == "abort")


@given(steps=STEPS)
@settings(max_examples=150, derandomize=True, deadline=None)
def test_never_one_that_is_left_alone_while_another_is_well_and_all_recover(steps):
    async def run() -> None:
        it = Replicas()
        for what, which in steps:
            await play(it, what, which)
        while it.inside:
            it.end(0, None, is_left=True)
        it.now += OPEN_SECONDS
        for _ in range(NUM_SERVERS):  # one request for each, whatever the prefixes say
            await it.ask()
            it.end(-1, None)
        assert {str(server.breaker.state) for server in it.all} == {"closed"}

    asyncio.run(run())


async def test_the_next_request_tries_the_server_whose_time_is_over_but_no_retry_does():
    it = Replicas()
    await it.fail(MAX_FAILURES, "merged-0")
    assert it.all[0].breaker.state == "open"
    assert {(await it.ask()).name for _ in range(6)} == {"merged-1", "merged-2"}
    it.now += OPEN_SECONDS
    assert (await it.ask(job(frozenset({"merged-1"})))).name == "merged-2"
    assert (await it.ask()).name == "merged-0"
    assert (await it.ask()).name != "merged-0"  # one tries at a time


async def test_who_fails_a_request_before_it_has_a_place_lets_the_next_try():
    """A trial whose client leaves while it waits, or as soon as it was chosen, must not be the last one."""
    it = Replicas()
    await it.fail(MAX_FAILURES, "merged-0")
    it.now += OPEN_SECONDS
    asking = asyncio.create_task(it.picker.place(job(), "merged"))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await it.ask()).name == "merged-0"
    it.end(-1, None, is_left=True)
    assert (await it.ask()).name == "merged-0"


async def test_those_who_wait_for_a_server_that_is_left_alone_meanwhile_are_told():
    it = Replicas()
    it.admission = Admission("merged", max_running=1, max_waiting=4, timeout_seconds=60.0)
    it.picker = Picker("x", it.servers, {"merged": it.admission}, {side: InstanceChoice() for side in SIDES})
    for server in it.all[1:]:
        it.servers.mark_down(server, "scripted")
    for _ in range(MAX_FAILURES - 1):
        await it.ask()
        it.end(-1, UpstreamTimeout("x"))
    await it.ask()
    waiting = asyncio.create_task(it.picker.place(job(), "merged"))
    await asyncio.sleep(0)
    it.end(-1, UpstreamTimeout("x"))
    with pytest.raises(TargetUnavailable, match=r"merged-0 has failed several times in a row \(timeout\)"):
        await waiting


async def test_what_was_seen_down_and_is_back_is_asked_at_once():
    it = Replicas()
    await it.fail(MAX_FAILURES, "merged-0")
    answers = {"http://h0": [False, True]}

    class Looks:
        async def is_healthy(self, root: str) -> bool:
            told = answers.get(root)
            return told.pop(0) if told else True

    looks: Any = Looks()
    it.servers._probe = looks
    for expected in ("open", "closed"):
        await it.servers._look(it.all[0])
        assert it.all[0].breaker.state == expected


async def test_one_that_is_well_by_its_own_account_is_not_asked_for_that():
    """It took no connection of a request, and answers every look: it isn't known to be another process."""
    it = Replicas()

    class Looks:
        async def is_healthy(self, root: str) -> bool:
            return True

    looks: Any = Looks()
    it.servers._probe = looks
    for _ in range(MAX_FAILURES):
        await it.fail(1, "merged-0")
        it.servers.mark_down(it.all[0], "scripted")
        await it.servers._look(it.all[0])
        assert it.all[0].is_up
    assert it.all[0].breaker.state == "open"
