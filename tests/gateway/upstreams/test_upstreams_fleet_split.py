"""Several prefill and decode processes of the scripted engine, as the real ones are started and connected."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from gateway.core.types import CacheMode
from gateway.upstreams.engine.supervisor import InstanceState
from gateway.upstreams.engine.upstream import EngineUpstream
from support.engine_upstream import (
    DEADLINE_SECONDS,
    endless,
    make_request,
    read_text,
    running_upstream,
    start_reading,
    until_no_blocks_in_use,
)

SPLIT = CacheMode.SPLIT
TWO_AND_TWO = {"prefill_gpus": (0, 1), "decode_gpus": (0, 1)}


def all_up(upstream: EngineUpstream) -> bool:
    is_ready = all(report.state is InstanceState.READY for report in upstream.ready_state())
    return is_ready and all(pair.connected for pair in upstream.pair_state())


async def until_all_up(upstream: EngineUpstream) -> None:
    await asyncio.wait_for(upstream.wait_until(lambda: all_up(upstream)), DEADLINE_SECONDS)


def pids(upstream: EngineUpstream) -> dict[str, int]:
    return {report.name: report.pid or 0 for report in upstream.ready_state()}


async def test_two_by_two_processes_serve_and_leave_nothing_behind():
    async with running_upstream("tokens=20", modes=(SPLIT,), layout=TWO_AND_TWO, num_cores=4) as upstream:
        await until_all_up(upstream)
        texts = [f"a{i} b{i}" for i in range(12)]
        answers = await asyncio.gather(*(read_text(upstream, make_request(SPLIT, text)) for text in texts))

        assert answers == [f"{text} " * 10 for text in texts]
        await until_no_blocks_in_use(upstream)
        stats = await upstream.stats()
        assert all(stats[name].num_steps > 0 for name in ("decode-0", "decode-1"))
        assert stats["prefill-0"].num_steps + stats["prefill-1"].num_steps == 12


async def test_a_prefill_process_that_dies_costs_no_stream_that_decodes_and_split_goes_on():
    async with running_upstream("delay=0.005", modes=(SPLIT,), layout=TWO_AND_TWO, num_cores=4) as upstream:
        await until_all_up(upstream)
        decoding = [await start_reading(upstream, endless(SPLIT, f"a{i} b{i}")) for i in range(2)]
        before = pids(upstream)
        os.kill(before["prefill-0"], signal.SIGKILL)
        answers = [await read_text(upstream, make_request(SPLIT, "c d", max_tokens=2)) for _ in range(4)]
        await until_all_up(upstream)

        assert answers == ["c d "] * 4
        assert not any(task.done() for task in decoding)
        after = pids(upstream)
        assert {name for name in before if before[name] != after[name]} == {"prefill-0"}
        for task in decoding:
            task.cancel()
        await asyncio.wait(decoding)
        await until_no_blocks_in_use(upstream)


async def test_a_prefill_process_that_hangs_is_killed_when_its_lease_is_over(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    options = {"layout": TWO_AND_TWO, "num_cores": 4, "lease_seconds": 0.6, "modes": (SPLIT,)}
    async with running_upstream("tokens=4", **options) as upstream:  # type: ignore[arg-type]
        await until_all_up(upstream)
        before = pids(upstream)
        os.kill(before["prefill-1"], signal.SIGSTOP)
        replaced = lambda: pids(upstream)["prefill-1"] not in (0, before["prefill-1"])  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(replaced), DEADLINE_SECONDS)
        await until_all_up(upstream)

        after = pids(upstream)
        assert {name for name in before if before[name] != after[name]} == {"prefill-1"}
        assert await read_text(upstream, make_request(SPLIT, "a b")) == "a b a b "
        await until_no_blocks_in_use(upstream)
    assert "prefill-1 engine: ready -> restarting: it is hung, says decode-" in caplog.text
