"""`[[pairs]]` of settings that are read again: who is watched, what is kept, and what ends with its last request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from pairs_support import CHAT, KINDS, SPLIT, WHOLE
from test_web_reload import reloadable
from web_support import Gateway

from gateway.settings.schema import (
    LimitSettings,
    PairSettings,
    RetrySettings,
    ServerSettings,
    Settings,
    TimeoutSettings,
)
from gateway.web.keys import IN_FORCE
from support.pd_servers import PdServer, World, listening
from support.waiting import until


@asynccontextmanager
async def servers(*sides: str, engine: str = "vllm") -> AsyncIterator[list[PdServer]]:
    world = World()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(listening(PdServer(KINDS[engine], side, world))) for side in sides]


def settings(*pairs: PairSettings, **parts: Any) -> Settings:
    return Settings(pairs=pairs, retry=RetrySettings(max_attempts=1), **parts)


def pair_of(
    prefill: Sequence[PdServer], decode: Sequence[PdServer], name: str = "pair", **options: Any
) -> PairSettings:
    urls = {"prefill": tuple(s.url for s in prefill), "decode": tuple(s.url for s in decode)}
    return PairSettings(**{"name": name, "engine": "vllm", "models": ("m",), **urls, **options})


def held(server: PdServer, where: str = "piece 1") -> asyncio.Event:
    """The server's answers wait there until this is set."""
    go = asyncio.Event()
    server.pause = lambda at: go if at == where else None
    return go


async def ask(gateway: Gateway, **fields: Any) -> Any:
    return await gateway.post("/v1/chat/completions", {**CHAT, **fields}, headers=SPLIT)


def pairs_in_force(gateway: Gateway) -> Any:
    return gateway.app[IN_FORCE].current.pairs


async def test_a_changed_pair_takes_effect_at_once_and_a_running_stream_keeps_its_servers():
    async with servers("prefill", "decode", "prefill", "decode") as (p, d, p2, d2):
        go = held(d)
        async with reloadable(settings(pair_of([p], [d]))) as (gateway, reload, _):
            before = pairs_in_force(gateway)["pair"]
            task = asyncio.create_task(ask(gateway, stream=True))
            await until(lambda: d.num_running == 1 and p.got)
            await reload(settings(pair_of([p2], [d2])))
            after = await ask(gateway)
            assert not before._watch.done()
            go.set()
            running = await task
            await until(before._watch.cancelled, "the old servers are no longer watched")
            state = (await gateway.get("/ready")).json()
            figures = (await gateway.get("/v1/engines")).json()["upstreams"]["pair"]["servers"]
    assert (running.text(), running.done) == (WHOLE, True)
    assert (after.status, len(p2.got), len(d2.got), len(d.got)) == (200, 1, 1, 1)
    assert {server["url"] for server in state["targets"]["pair"]["servers"]} == {p2.url, d2.url}
    assert {server["url"] for server in figures} == {p2.url, d2.url}
    assert (state["settings"]["generation"], state["settings"]["needs_restart"]) == (2, [])


async def test_an_unchanged_pair_goes_on_with_its_counts_its_probes_and_what_it_has_learnt():
    async with servers("prefill", "decode", "prefill", "decode") as (p, d, p2, d2):
        go = held(d)
        one = pair_of([p], [d], max_running=1, queue_timeout_seconds=0.05)
        async with reloadable(settings(one)) as (gateway, reload, _):
            before = pairs_in_force(gateway)["pair"]
            task = asyncio.create_task(ask(gateway, stream=True))
            await until(lambda: d.num_running == 1)
            limits = {
                "limits": LimitSettings(max_concurrent_requests=9),
                "timeouts": TimeoutSettings(heartbeat_seconds=9),
            }
            await reload(settings(one, pair_of([p2], [d2], "other", models=("n",)), **limits))
            assert pairs_in_force(gateway)["pair"] is before
            assert 'kvgate_upstream_in_flight{backend="pair"} 1.0' in (await gateway.get("/metrics")).body.decode()
            full = await ask(gateway)
            other = await ask(gateway, model="n")
            await reload(settings(one, server=ServerSettings(model="m")))
            assert pairs_in_force(gateway)["pair"] is before
            go.set()
            await task
            assert (await ask(gateway)).status == 200
    assert (full.status, "No decode server had room" in full.error["message"]) == (429, True)
    assert other.status == 200
    assert (p.num_version_asked, d.num_version_asked) == (1, 1)


async def test_a_pair_that_is_taken_out_is_gone_from_every_page_and_leaves_nothing_behind(caplog):
    caplog.set_level(logging.INFO)
    async with servers("prefill", "decode", "prefill", "decode") as (p, d, p2, d2):
        both = settings(pair_of([p], [d]), pair_of([p2], [d2], "other", models=("n",)))
        async with reloadable(both) as (gateway, reload, _):
            gone = pairs_in_force(gateway)["other"]
            assert (await ask(gateway, model="n")).status == 200
            assert 'backend="other",server="prefill-0"' in (await gateway.get("/metrics")).body.decode()
            await reload(settings(pair_of([p], [d])))
            await until(lambda: "target other: its servers are no longer watched" in caplog.text)
            metrics = (await gateway.get("/metrics")).body.decode()
            ready = (await gateway.get("/ready")).json()
            models = [card["id"] for card in (await gateway.get("/v1/models")).json()["data"]]
            unknown = await ask(gateway, model="n")
            assert gone._watch.cancelled()
            assert gone._learning.done()
    assert 'kvgate_server_up{backend="other"' not in metrics
    assert 'kvgate_server_up{backend="pair",server="prefill-0"} 1.0' in metrics
    assert list(ready["targets"]) == ["pair"]
    assert "n" not in models
    assert unknown.status == 404


async def test_a_pair_that_comes_first_needs_no_restart_either():
    async with servers("prefill", "decode", "merged") as (p, d, m):
        only_merged = PairSettings(name="plain", engine="vllm", merged=(m.url,), models=("x",))
        async with reloadable(settings(only_merged)) as (gateway, reload, _):
            assert (await ask(gateway)).status == 404
            await reload(settings(only_merged, pair_of([p], [d])))
            assert (await ask(gateway)).headers["X-Cache-Instance"] == "prefill-0 + decode-0"


async def test_many_reloads_of_pairs_leave_no_task_no_part_and_no_connection():
    async with servers("prefill", "decode") as (p, d):
        async with reloadable(settings(pair_of([p], [d]))) as (gateway, reload, _):
            maker = gateway.app[IN_FORCE]._ended.__self__
            for i in range(12):
                changed = pair_of([p], [d], max_running=2 + i)
                await reload(settings(changed, timeouts=TimeoutSettings(idle_seconds=10 + i)))
                assert (await ask(gateway)).status == 200
            await until(lambda: not maker._closing)
            watching = [t for t in asyncio.all_tasks() if "Servers.watch" in repr(t.get_coro())]
            assert len(watching) == 1
            assert len(maker._parts._parts) == 2  # the connections, and the pair
        await until(lambda: not [t for t in asyncio.all_tasks() if "Servers." in repr(t.get_coro())])


async def test_a_generation_that_can_not_be_made_leaves_no_pair_that_is_watched(monkeypatch):
    async with servers("prefill", "decode", "prefill", "decode") as (p, d, p2, d2), AsyncExitStack() as stack:
        gateway, reload, _ = await stack.enter_async_context(reloadable(settings(pair_of([p], [d]))))
        maker = gateway.app[IN_FORCE]._ended.__self__
        monkeypatch.setattr("gateway.app.PriceBook.of", broken)
        await reload(settings(pair_of([p2], [d2])))
        await until(lambda: not maker._closing)
        watching = [t for t in asyncio.all_tasks() if "Servers.watch" in repr(t.get_coro())]
        answer = await ask(gateway)
        ready = (await gateway.get("/ready")).json()["settings"]
    assert len(watching) == 1
    assert (answer.status, len(p.got), ready["generation"]) == (200, 1, 1)
    assert ready["problems"]


def broken(*_parts: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_new_key_of_a_pair_is_used_by_new_requests_and_by_its_probes(engine):
    async with servers("prefill", "decode", engine=engine) as (p, d), AsyncExitStack() as stack:
        first, second = (settings(pair_of([p], [d], engine=engine, api_key=key)) for key in ("sk-one", "sk-two"))
        gateway, reload, _ = await stack.enter_async_context(reloadable(first))
        await ask(gateway)
        await reload(second)
        await ask(gateway)
    assert [got.header("Authorization") for got in (*p.got, *d.got)] == ["Bearer sk-one", "Bearer sk-two"] * 2
