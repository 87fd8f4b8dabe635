"""Processes that die, hang or are told to stop: who hears of it, what comes back, what is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.core.errors import ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, Started
from gateway.upstreams.engine.supervisor import InstanceState, Policy
from gateway.upstreams.engine.upstream import STATS_SECONDS, EngineUpstream
from support.engine_upstream import (
    DEADLINE_SECONDS,
    QUICK,
    endless,
    make_request,
    read_text,
    report,
    running_upstream,
    start_reading,
    until_no_blocks_in_use,
)
from support.gateway_process import descendants, is_alive, wait_until

MODE_OF_ROLE = {"merged": CacheMode.MERGED, "decode": CacheMode.SPLIT, "prefill": CacheMode.SPLIT}
SLOW = "tokens=200,delay=0.002"


def kill(upstream: EngineUpstream, role: str, number: signal.Signals = signal.SIGKILL) -> int:
    pid = report(upstream, role).pid
    assert pid is not None
    os.kill(pid, number)
    return pid


async def until_back(upstream: EngineUpstream, role: str, old_pid: int) -> None:
    """The role is served by another process, and every mode can be served."""

    def back() -> bool:
        now = report(upstream, role)
        return now.pid not in (None, old_pid) and set(upstream.modes()) == set(CacheMode)

    await asyncio.wait_for(upstream.wait_until(back), DEADLINE_SECONDS)


@pytest.mark.parametrize(("role", "other"), [("merged", CacheMode.SPLIT), ("decode", CacheMode.MERGED)])
async def test_a_killed_engine_ends_its_streams_and_is_back_while_the_other_mode_goes_on(role: str, other: CacheMode):
    async with running_upstream(SLOW) as upstream:
        mode = MODE_OF_ROLE[role]
        broken = [await start_reading(upstream, endless(mode)) for _ in range(3)]
        untouched = await start_reading(upstream, make_request(other, "a b", max_tokens=150))
        old_pid = kill(upstream, role)

        for task in broken:
            with pytest.raises(UpstreamGone, match=f"The {role} engine process is gone"):
                await asyncio.wait_for(task, DEADLINE_SECONDS)
        assert await untouched == "a b " * 75
        await until_back(upstream, role, old_pid)
        assert await read_text(upstream, make_request(mode, "again", max_tokens=1)) == "again "
        await until_no_blocks_in_use(upstream)
        assert report(upstream, role).num_restarts == 1


async def test_while_an_engine_is_being_restarted_its_mode_is_refused_with_the_reason():
    patient = Policy(first_restart_seconds=60.0, longest_restart_seconds=60.0)
    async with running_upstream(SLOW, policy=patient) as upstream:
        kill(upstream, "merged")
        waiting = lambda: "SIGKILL" in report(upstream, "merged").reason  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(waiting), DEADLINE_SECONDS)

        with pytest.raises(
            ModeUnavailable, match=r"merged is restarting \(the process was killed by SIGKILL\)"
        ) as caught:
            await read_text(upstream, make_request(CacheMode.MERGED))
        assert upstream.modes() == (CacheMode.SPLIT,)
        assert caught.value.is_restarting
        assert caught.value.retry_after_seconds == max(1.0, report(upstream, "merged").start_seconds or 0.0)


@pytest.mark.parametrize("role", ["merged", "decode", "prefill"])
async def test_a_request_that_failed_with_its_engine_can_wait_until_it_is_back(role: str):
    async with running_upstream(SLOW) as upstream:
        request = make_request(MODE_OF_ROLE[role], "again", max_tokens=1)
        old_pid = kill(upstream, role)
        down = lambda: MODE_OF_ROLE[role] not in upstream.modes()  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(down), DEADLINE_SECONDS)
        with pytest.raises(ModeUnavailable) as caught:
            await read_text(upstream, request)
        assert caught.value.is_restarting

        await asyncio.wait_for(upstream.back(request.strategy), DEADLINE_SECONDS)
        assert report(upstream, role).pid not in (None, old_pid)
        assert await read_text(upstream, make_request(MODE_OF_ROLE[role], "again", max_tokens=1)) == "again "


async def test_an_engine_that_was_never_up_is_starting_and_not_restarting():
    async with running_upstream("start_delay=60", wait_ready=False) as upstream:
        for mode in CacheMode:
            with pytest.raises(ModeUnavailable) as caught:
                await read_text(upstream, make_request(mode))
            assert not caught.value.is_restarting
            assert caught.value.retry_after_seconds == 1.0


async def test_waiting_for_an_engine_ends_when_it_is_given_up():
    policy = Policy(first_restart_seconds=0.01, max_restarts=0)
    async with running_upstream(SLOW, policy=policy, modes=(CacheMode.MERGED,)) as upstream:
        request = make_request(CacheMode.MERGED)
        waiting = asyncio.create_task(upstream.back(request.strategy))
        kill(upstream, "merged")
        given_up = lambda: report(upstream, "merged").state is InstanceState.FAILED  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(given_up), DEADLINE_SECONDS)
        await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        await asyncio.wait_for(upstream.back(request.strategy), DEADLINE_SECONDS)

        with pytest.raises(ModeUnavailable) as caught:
            await read_text(upstream, request)
        assert not caught.value.is_restarting


async def test_a_killed_prefill_side_fails_what_waits_for_it_and_is_paired_again():
    async with running_upstream("tokens=200,delay=0.02", decode_max_batch=4) as upstream:
        decoding = await start_reading(upstream, make_request(CacheMode.SPLIT, "a b", max_tokens=60))
        os.kill(report(upstream, "prefill").pid or 0, signal.SIGSTOP)
        async with aclosing(upstream.stream(endless(CacheMode.SPLIT))) as waiting:
            assert isinstance(await anext(waiting), Started)
            old_pid = kill(upstream, "prefill")
            with pytest.raises(UpstreamGone, match="prefill"):
                await asyncio.wait_for(anext(waiting), DEADLINE_SECONDS)
        assert await asyncio.wait_for(decoding, DEADLINE_SECONDS) == "a b " * 30
        await until_back(upstream, "prefill", old_pid)
        assert await read_text(upstream, make_request(CacheMode.SPLIT, "again", max_tokens=1)) == "again "
        assert report(upstream, "decode").num_restarts == 0
        await until_no_blocks_in_use(upstream)


async def test_both_sides_killed_at_once_are_paired_again():
    async with running_upstream(SLOW) as upstream:
        old = [kill(upstream, role) for role in ("prefill", "decode")]
        await until_back(upstream, "prefill", old[0])
        await until_back(upstream, "decode", old[1])

        assert await read_text(upstream, make_request(CacheMode.SPLIT, "again", max_tokens=1)) == "again "


async def test_an_engine_that_hangs_is_killed_and_started_again():
    impatient = Policy(first_restart_seconds=0.05, probe_interval_seconds=0.02, probe_deadline_seconds=0.3)
    async with running_upstream(SLOW, policy=impatient, modes=(CacheMode.MERGED,)) as upstream:
        stream = await start_reading(upstream, endless(CacheMode.MERGED))
        old_pid = kill(upstream, "merged", signal.SIGSTOP)

        with pytest.raises(UpstreamGone):
            await asyncio.wait_for(stream, DEADLINE_SECONDS)
        assert report(upstream, "merged").reason == "it did not answer for 0.3 s"
        back = lambda: report(upstream, "merged").pid not in (None, old_pid) and bool(upstream.modes())  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(back), DEADLINE_SECONDS)


async def test_an_engine_that_keeps_dying_is_given_up_with_the_last_reason():
    policy = Policy(first_restart_seconds=0.01, max_restarts=2)
    async with running_upstream("bug=boom", policy=policy, modes=(CacheMode.MERGED,)) as upstream:
        for _ in range(3):
            await asyncio.wait_for(upstream.wait_ready(), DEADLINE_SECONDS)
            with pytest.raises(UpstreamGone):
                await read_text(upstream, make_request(CacheMode.MERGED, "boom"))
        given_up = lambda: report(upstream, "merged").state is InstanceState.FAILED  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(given_up), DEADLINE_SECONDS)

        with pytest.raises(ModeUnavailable, match=r"merged is failed .*exited with code 70") as caught:
            await read_text(upstream, make_request(CacheMode.MERGED))
        assert caught.value.retry_after_seconds is None
        assert not caught.value.is_restarting


async def test_closing_lets_running_streams_finish_and_leaves_no_process():
    async with running_upstream(SLOW) as upstream:
        pids = [item.pid for item in upstream.ready_state() if item.pid is not None]
        tasks = [await start_reading(upstream, make_request(mode, "a b", max_tokens=100)) for mode in CacheMode]
        closing = asyncio.create_task(upstream.close())

        assert [await task for task in tasks] == ["a b " * 50] * 2
        await asyncio.wait_for(closing, DEADLINE_SECONDS)
        assert len(pids) == 3
        assert not any(map(is_alive, pids))
        with pytest.raises(ModeUnavailable):
            await read_text(upstream, make_request(CacheMode.MERGED))


async def test_a_prefill_side_that_is_told_to_end_by_others_too_is_not_taken_for_dead(
    caplog: pytest.LogCaptureFixture,
):
    """A service manager tells the whole process group to end, while the gateway still waits for its requests."""
    caplog.set_level(logging.INFO)
    options = {"kv_cache_variants": ("fp16",)}
    async with running_upstream("delay=0.005", modes=(CacheMode.SPLIT,), engine_options=options) as upstream:
        requests = [
            make_request(CacheMode.SPLIT, "a b", kv_cache_dtype=dtype, max_tokens=100, ignore_eos=True)
            for dtype in ("auto", "fp16")
        ]
        decoding = [await start_reading(upstream, request) for request in requests]
        upstream.stop_soon()
        kill(upstream, "prefill", signal.SIGTERM)
        (variant,) = upstream.variant_state()
        os.kill(next(item.pid or 0 for item in variant.instances if item.name == "prefill[fp16]"), signal.SIGTERM)
        stopped = lambda: report(upstream, "prefill").state is InstanceState.STOPPED  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(stopped), DEADLINE_SECONDS)

        assert await asyncio.gather(*decoding) == ["a b " * 50] * 2
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)
    assert "prefill engine: ready -> draining: the gateway is shutting down" in caplog.text
    assert not any(word in caplog.text for word in ("restarting", "given up"))


async def test_an_instance_in_a_long_step_gives_its_last_figures_with_their_age():
    async with running_upstream(SLOW) as upstream:
        fresh = (await upstream.stats())["merged"]
        pid = kill(upstream, "merged", signal.SIGSTOP)
        late = await upstream.stats()
        os.kill(pid, signal.SIGCONT)

        assert set(late) == {"merged", "decode", "prefill"}
        assert late["merged"].stale_seconds >= STATS_SECONDS
        assert late["merged"].num_blocks == fresh.num_blocks == 1024
        assert late["decode"].stale_seconds == fresh.stale_seconds == 0.0


async def test_closing_does_not_wait_longer_than_it_may():
    async with running_upstream("delay=0.01", shutdown_seconds=0.1) as upstream:
        pids = [item.pid for item in upstream.ready_state() if item.pid is not None]
        endless_one = await start_reading(upstream, endless(CacheMode.SPLIT))
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)

        with pytest.raises(UpstreamGone):
            await endless_one
        assert not any(map(is_alive, pids))


async def test_closing_ends_even_a_process_that_hangs():
    policy = Policy(exit_seconds=0.1)
    async with running_upstream(SLOW, policy=policy, shutdown_seconds=0.1, modes=(CacheMode.MERGED,)) as upstream:
        pid = kill(upstream, "merged", signal.SIGSTOP)
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)

        assert not is_alive(pid)


async def test_closing_while_instances_start_ends_them():
    async with running_upstream("start_delay=60", wait_ready=False) as upstream:
        started = lambda: all(item.pid for item in upstream.ready_state())  # noqa: E731
        await asyncio.wait_for(upstream.wait_until(started), DEADLINE_SECONDS)
        pids = [item.pid for item in upstream.ready_state() if item.pid is not None]
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)

        assert not any(map(is_alive, pids))


STAND_IN = textwrap.dedent(
    """
    import asyncio
    from gateway.core.types import CacheMode, Started
    from support.engine_upstream import endless, running_upstream, start_reading

    async def main():
        variants = {"kv_cache_variants": ("fp16",)}
        async with running_upstream("delay=0.002", engine_options=variants) as upstream:
            for mode in CacheMode:
                await start_reading(upstream, endless(mode))
            await start_reading(upstream, endless(CacheMode.SPLIT, kv_cache_dtype="fp16"))
            print("serving", flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_lc_03_a_killed_gateway_leaves_no_process_and_no_shared_memory():
    before = set(Path("/dev/shm").iterdir())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.getcwd()])}
    command = [sys.executable, "-c", STAND_IN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as stand_in:
        assert stand_in.stdout is not None
        try:
            assert stand_in.stdout.readline() == b"serving\n"
            children = descendants(stand_in.pid)
            assert len(children) == 5
            assert all(map(is_alive, children))
        finally:
            stand_in.kill()

    wait_until(lambda: not any(map(is_alive, children)), "every engine process is gone", 10)
    assert set(Path("/dev/shm").iterdir()) <= before


def test_the_quick_policy_of_these_tests_differs_only_in_time():
    assert QUICK.max_restarts == Policy().max_restarts
