"""Several instances of each role: who is connected with whom, who takes a request, what the end of one means."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import ModeUnavailable, Overloaded, UpstreamGone
from gateway.core.types import CacheMode, ChatRequest, Started, TextDelta
from gateway.upstreams.engine.supervisor import InstanceState, Policy
from gateway.upstreams.engine.upstream import EngineUpstream
from support.engine_upstream import DEADLINE_SECONDS, make_request, read_text, running_upstream
from support.stand_in_engine import COMMAND

MERGED, SPLIT = CacheMode.MERGED, CacheMode.SPLIT
LAYOUT = {"prefill_gpus": (0, 1), "decode_gpus": (2, 3), "merged_gpus": (0, 1)}
NAMES = ["merged-0", "merged-1", "decode-0", "decode-1", "prefill-0", "prefill-1"]
PATIENT = Policy(first_restart_seconds=60.0, longest_restart_seconds=60.0, exit_seconds=5.0)


@asynccontextmanager
async def fleet(**options: Any) -> AsyncIterator[EngineUpstream]:
    """Two instances of each role, all of them up and connected."""
    settings = {"layout": LAYOUT, "command": COMMAND, "num_cores": 8, **options}
    async with running_upstream(**settings) as upstream:
        await until(upstream, lambda: all_up(upstream))
        yield upstream


def all_up(upstream: EngineUpstream) -> bool:
    is_ready = all(report.state is InstanceState.READY for report in upstream.ready_state())
    return is_ready and all(pair.connected for pair in upstream.pair_state())


async def until(upstream: EngineUpstream, condition: Any) -> None:
    await asyncio.wait_for(upstream.wait_until(condition), DEADLINE_SECONDS)


def pids(upstream: EngineUpstream) -> dict[str, int]:
    return {report.name: report.pid or 0 for report in upstream.ready_state()}


async def open_stream(upstream: EngineUpstream, request: ChatRequest) -> tuple[Any, Started]:
    """A stream whose request was accepted, and by whom."""
    events = upstream.stream(request)
    started = await asyncio.wait_for(anext(events), DEADLINE_SECONDS)
    assert isinstance(started, Started)
    return events, started


async def taken_by(upstream: EngineUpstream, request: ChatRequest) -> Started:
    """Who answered it, and why that one."""
    events, started = await open_stream(upstream, request)
    async with aclosing(events):
        async for event in events:
            started = event if isinstance(event, Started) else started
    return started


async def test_every_device_of_a_list_has_its_instance_and_every_prefill_meets_every_decode():
    async with fleet() as upstream:
        assert [report.name for report in upstream.ready_state()] == NAMES
        assert list(upstream.instance_names()) == NAMES
        assert set(await upstream.stats()) == set(NAMES)
        pairs = [(pair.decode, pair.prefill) for pair in upstream.pair_state()]
        assert pairs == [(f"decode-{i}", f"prefill-{j}") for i in (0, 1) for j in (0, 1)]
        assert {(pair.transfer_backend, pair.same_device) for pair in upstream.pair_state()} == {("local", True)}


async def test_each_side_is_told_the_name_of_the_other_beside_its_socket():
    async with fleet() as upstream:
        for _ in range(2):
            events, started = await open_stream(upstream, make_request(SPLIT, "peers"))
            async with aclosing(events):
                text = await anext(events)
            assert text.text == f"prefill-0>{started.instance} prefill-1>{started.instance}"


async def test_one_instance_of_a_role_keeps_the_roles_name():
    layout = {"prefill_gpus": (0, 1)}
    async with running_upstream(layout=layout, command=COMMAND, num_cores=4) as upstream:
        assert list(pids(upstream)) == ["merged", "decode", "prefill-0", "prefill-1"]


async def test_a_prefill_side_that_dies_is_replaced_alone_while_split_is_served():
    async with fleet() as upstream:
        before = pids(upstream)
        os.kill(before["prefill-0"], signal.SIGKILL)
        down = lambda: [pair.connected for pair in upstream.pair_state()] == [False, True, False, True]  # noqa: E731
        await until(upstream, down)

        assert set(upstream.modes()) == {MERGED, SPLIT}
        assert (await read_text(upstream, make_request(SPLIT, "who"))).startswith("decode-")
        await until(upstream, lambda: all_up(upstream))
        after = pids(upstream)
        assert {name for name in NAMES if before[name] != after[name]} == {"prefill-0"}


async def test_a_decode_side_that_dies_is_replaced_alone_and_meets_all_prefill_sides_again():
    async with fleet() as upstream:
        before = pids(upstream)
        os.kill(before["decode-1"], signal.SIGKILL)
        await until(upstream, lambda: not any(pair.connected for pair in upstream.pair_state()[2:]))
        assert await read_text(upstream, make_request(SPLIT, "who")) == "decode-0"
        await until(upstream, lambda: all_up(upstream))

        after = pids(upstream)
        assert {name for name in NAMES if before[name] != after[name]} == {"decode-1"}


async def test_split_is_served_as_long_as_one_pair_is_connected_and_not_longer():
    async with fleet(policy=PATIENT) as upstream:
        for name in ("decode-0", "prefill-1"):
            os.kill(pids(upstream)[name], signal.SIGKILL)
        left = lambda: [pair.prefill for pair in upstream.pair_state() if pair.connected] == ["prefill-0"]  # noqa: E731
        await until(upstream, left)
        assert SPLIT in upstream.modes()
        os.kill(pids(upstream)["prefill-0"], signal.SIGKILL)
        await until(upstream, lambda: SPLIT not in upstream.modes())

        with pytest.raises(ModeUnavailable, match=r"decode-1 is starting \(prefill-0: .*; prefill-1: ") as caught:
            await read_text(upstream, make_request(SPLIT))
        assert caught.value.retry_after_seconds is not None
        assert upstream.modes() == (MERGED,)


async def test_a_hung_prefill_side_is_killed_at_once_and_the_log_says_why(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with fleet() as upstream:
        before = pids(upstream)
        os.kill(before["prefill-1"], signal.SIGSTOP)  # it would not end by itself
        await read_text(upstream, make_request(SPLIT, "hung prefill-1"))
        await until(upstream, lambda: pids(upstream)["prefill-1"] not in (0, before["prefill-1"]))
        await until(upstream, lambda: all_up(upstream))

        after = pids(upstream)
        assert {name for name in NAMES if before[name] != after[name]} == {"prefill-1"}
        assert next(item.num_restarts for item in upstream.ready_state() if item.name == "prefill-1") == 1
    said = "it is hung, says decode-0: nothing was heard of it for 10 s"
    assert f"prefill-1 engine: killing process {before['prefill-1']}: {said}" in caplog.text
    assert f"prefill-1 engine: ready -> restarting: {said}" in caplog.text


async def test_news_of_a_hung_process_that_was_replaced_already_kill_nobody(caplog: pytest.LogCaptureFixture):
    async with fleet() as upstream:
        os.kill(pids(upstream)["prefill-1"], signal.SIGKILL)
        await until(upstream, lambda: not all_up(upstream))
        await read_text(upstream, make_request(SPLIT, "hung prefill-1"))
        await until(upstream, lambda: all_up(upstream))
        await read_text(upstream, make_request(SPLIT, "hung nobody"))

        assert sum(item.num_restarts for item in upstream.ready_state()) == 1
    assert "killing" not in caplog.text
    assert "spoke of a prefill side 'nobody', which there is not" in caplog.text


@pytest.mark.parametrize("mode", list(CacheMode))
async def test_idle_instances_share_the_work_and_the_answer_says_who_served(mode: CacheMode):
    async with fleet() as upstream:
        streams = [await open_stream(upstream, make_request(mode, "hold")) for _ in range(4)]
        names = [started.instance for _, started in streams]
        for events, _ in streams:
            await events.aclose()

    kind = "merged" if mode is MERGED else "decode"
    assert sorted(names) == [f"{kind}-0", f"{kind}-0", f"{kind}-1", f"{kind}-1"]


async def test_a_conversation_comes_back_to_who_has_its_beginning():
    async with fleet() as upstream:
        first = make_request(MERGED, "word " * 500)
        events, home = await open_stream(upstream, first)
        await events.aclose()
        for text in ("other " * 400, "third " * 400):
            await taken_by(upstream, make_request(MERGED, text))
        turns = [*first.prompt.messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
        second = replace(first, request_id="second", prompt=type(first.prompt)(messages=turns))
        taken = await taken_by(upstream, second)

        assert taken.instance == home.instance
        assert taken.instance_reason.startswith("prefix: ")


async def test_a_session_stays_where_it_is():
    async with fleet() as upstream:
        first = await taken_by(upstream, replace(make_request(SPLIT, "a"), session="mine"))
        others = [await open_stream(upstream, make_request(SPLIT, "hold")) for _ in range(3)]
        again = await taken_by(upstream, replace(make_request(SPLIT, "b"), session="mine"))
        for events, _ in others:
            await events.aclose()

        assert (again.instance, again.instance_reason) == (first.instance, "session")


@pytest.mark.parametrize("what", ["die", "full"])
async def test_a_request_that_one_instance_can_not_begin_is_begun_by_another(what: str):
    async with fleet(policy=PATIENT) as upstream:
        starts, texts = [], []
        async with aclosing(upstream.stream(make_request(MERGED, f"{what} merged-0"))) as events:
            async for event in events:
                if isinstance(event, Started):
                    starts.append(event.instance)
                elif isinstance(event, TextDelta):
                    texts.append(event.text)

    assert texts == ["merged-1"]
    assert starts == (["merged-0", "merged-1"] if what == "die" else ["merged-1"])


async def test_an_answer_that_has_begun_is_not_begun_again():
    async with fleet(policy=PATIENT) as upstream:
        with pytest.raises(UpstreamGone, match="The merged-0 engine process is gone"):
            await read_text(upstream, make_request(MERGED, "begin and die merged-0"))


async def test_what_all_instances_refuse_is_refused():
    async with fleet() as upstream:
        with pytest.raises(Overloaded, match=r"merged-[01] is full"):
            await read_text(upstream, make_request(MERGED, "full merged-0 merged-1"))


async def test_a_variant_has_as_many_instances_and_its_own_pairs():
    options = {"kv_cache_variants": ("int8",)}
    async with fleet(engine_options=options, modes=(SPLIT,)) as upstream:
        text = await read_text(upstream, make_request(SPLIT, "peers", kv_cache_dtype="int8"))
        (variant,) = upstream.variant_state()

        names = ["decode-0[int8]", "decode-1[int8]", "prefill-0[int8]", "prefill-1[int8]"]
        assert [instance.name for instance in variant.instances] == names
        assert (variant.pairs[0].decode, variant.pairs[0].prefill) == ("decode-0[int8]", "prefill-0[int8]")
        assert "[int8]>decode-" in text
        assert set(names) < set(upstream.instance_names())
        assert {pair.decode for pair in upstream.pair_state()} == {"decode-0", "decode-1"}


async def test_pd_13_an_instance_that_comes_up_in_another_role_is_not_used():
    """As a command that ignores what it is told would: its mode must not be served in another mode's place."""
    quick = Policy(exit_seconds=0.05)
    command = (*COMMAND[:2], COMMAND[2].replace("main()", "main(role='decode')"))
    async with running_upstream(command=command, modes=(MERGED,), wait_ready=False, policy=quick) as upstream:
        with pytest.raises(ModeUnavailable, match="it came up as decode, and was started as merged"):
            await asyncio.wait_for(upstream.wait_ready(), DEADLINE_SECONDS)
