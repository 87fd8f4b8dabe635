"""Engine variants on demand, over real processes of the scripted engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest, ModeUnavailable, Overloaded, UpstreamGone
from gateway.core.types import CacheMode, CacheStrategy, Started, StrategySource
from gateway.upstreams.engine.supervisor import InstanceState, Policy
from gateway.upstreams.engine.upstream import EngineUpstream
from gateway.upstreams.engine.variants import VariantReport
from support.engine_upstream import (
    DEADLINE_SECONDS,
    endless,
    make_request,
    read_text,
    running_upstream,
    start_reading,
)
from support.gateway_process import is_alive
from support.waiting import until

MODES = list(CacheMode)
SCRIPT = "tokens=200,delay=0.002"


def upstream_with_variants(
    script: str = SCRIPT,
    *,
    modes: tuple[CacheMode, ...] = (CacheMode.MERGED,),
    policy: Policy | None = None,
    **more: Any,
) -> AbstractAsyncContextManager[EngineUpstream]:
    options = {"kv_cache_variants": ("fp16", "bf16"), **more}
    arguments = {} if policy is None else {"policy": policy}
    return running_upstream(script, modes=modes, engine_options=options, **arguments)


def variant(upstream: EngineUpstream, name: str) -> VariantReport:
    return next(report for report in upstream.variant_state() if report.name == name)


def pids(upstream: EngineUpstream, name: str) -> list[int]:
    return [instance.pid for instance in variant(upstream, name).instances if instance.pid is not None]


def ask(mode: CacheMode, dtype: str, text: str = "one two") -> Any:
    return make_request(mode, text, kv_cache_dtype=dtype, max_tokens=2)


@pytest.mark.parametrize("mode", MODES)
async def test_another_dtype_without_variants_is_refused_by_name_before_anything_happens(mode: CacheMode):
    async with running_upstream(SCRIPT, modes=(mode,)) as upstream:
        with pytest.raises(InvalidRequest, match=f"KV cache of the {mode.value} engine is fp32") as caught:
            await read_text(upstream, ask(mode, "fp16"))
        assert caught.value.param == "kvCacheDtype"
        assert "Use 'auto' or 'fp32'." in caught.value.message
        assert "kv_cache_variants" in caught.value.message
        for own in ("auto", "fp32"):
            assert await read_text(upstream, ask(mode, own)) == "one two "
        assert upstream.variant_state() == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_dtype_that_is_no_variant_is_refused_with_those_that_are(mode: CacheMode):
    async with upstream_with_variants(modes=(mode,)) as upstream:
        with pytest.raises(InvalidRequest, match="Engine variants started on demand: fp16, bf16"):
            upstream.variant_of(CacheStrategy(mode, StrategySource.BODY, kv_cache_dtype="fp8"))
        with pytest.raises(InvalidRequest, match="Use 'auto' or 'fp32' or 'fp16' or 'bf16'"):
            await read_text(upstream, ask(mode, "fp8"))


@pytest.mark.parametrize("mode", MODES)
async def test_a_variant_starts_on_demand_serves_and_goes_when_it_is_idle(
    mode: CacheMode, caplog: pytest.LogCaptureFixture
):
    name = f"{mode.value}[fp16]"
    caplog.set_level(logging.INFO)
    async with upstream_with_variants(modes=(mode,), variant_idle_seconds=1.5) as upstream:
        assert (variant(upstream, name).state, upstream.modes()) == ("stopped", (mode,))
        assert await read_text(upstream, ask(mode, "fp16")) == "one two "
        now = variant(upstream, name)
        assert (now.state, now.num_requests) == ("ready", 0)
        assert now.kv_pool_bytes > 0
        alive = pids(upstream, name)
        roles = ["merged[fp16]"] if mode is CacheMode.MERGED else ["decode[fp16]", "prefill[fp16]"]
        assert [instance.name for instance in now.instances] == roles
        assert set(roles) <= set(await upstream.stats()) <= set(upstream.instance_names())

        await until(lambda: variant(upstream, name).state == "stopped")
        assert not any(map(is_alive, alive))
        assert await read_text(upstream, ask(mode, "fp16")) == "one two "
        assert set(pids(upstream, name)).isdisjoint(alive)
        assert await read_text(upstream, ask(mode, "auto")) == "one two "
    assert "each of its processes has a KV pool of 1024 blocks (num_kv_blocks), and its own copy" in caplog.text
    assert "restarting" not in caplog.text
    assert f"{roles[0]} engine: ready -> draining: no request for 1.5 s" in caplog.text


async def test_requests_that_wait_share_one_start():
    async with upstream_with_variants("start_delay=0.3,start_kv=fp16") as upstream:
        answers = await asyncio.gather(*(read_text(upstream, ask(CacheMode.MERGED, "fp16")) for _ in range(5)))

        assert answers == ["one two "] * 5
        assert len(pids(upstream, "merged[fp16]")) == 1


async def test_an_idle_variant_makes_room_and_one_in_use_does_not():
    async with upstream_with_variants() as upstream:
        running = await start_reading(upstream, endless(CacheMode.MERGED, kv_cache_dtype="fp16"))
        with pytest.raises(Overloaded, match=r"engine.max_variants.*merged\[fp16\]") as caught:
            await read_text(upstream, ask(CacheMode.MERGED, "bf16"))
        assert caught.value.retry_after_seconds == 5.0
        old = pids(upstream, "merged[fp16]")
        running.cancel()
        await asyncio.wait([running])

        assert await read_text(upstream, ask(CacheMode.MERGED, "bf16")) == "one two "
        assert variant(upstream, "merged[fp16]").state == "stopped"
        assert not any(map(is_alive, old))


async def test_two_variants_run_beside_each_other_if_the_settings_say_so():
    modes = (CacheMode.MERGED, CacheMode.SPLIT)
    async with upstream_with_variants(modes=modes, max_variants=2) as upstream:
        answers = await asyncio.gather(*(read_text(upstream, ask(mode, "fp16")) for mode in modes))

        assert answers == ["one two "] * 2
        assert [report.name for report in upstream.variant_state() if report.state == "ready"] == [
            "merged[fp16]",
            "split[fp16]",
        ]
        assert set(await upstream.stats()) == {
            "merged", "decode", "prefill", "merged[fp16]", "decode[fp16]", "prefill[fp16]"
        }  # fmt: skip


async def test_a_client_that_leaves_while_it_starts_leaves_it_starting_and_then_idle():
    async with upstream_with_variants("start_delay=0.3,start_kv=fp16", variant_idle_seconds=0.3) as upstream:
        waiting = asyncio.create_task(read_text(upstream, ask(CacheMode.MERGED, "fp16")))
        await until(lambda: pids(upstream, "merged[fp16]"))
        assert variant(upstream, "merged[fp16]").num_waiting == 1
        (pid,) = pids(upstream, "merged[fp16]")
        waiting.cancel()
        await asyncio.wait([waiting])

        await until(lambda: variant(upstream, "merged[fp16]").state == "ready")
        assert pids(upstream, "merged[fp16]") == [pid]
        await until(lambda: variant(upstream, "merged[fp16]").state == "stopped")
        assert not is_alive(pid)


async def test_a_start_that_fails_is_told_to_all_who_wait_and_harms_no_other():
    async with upstream_with_variants("start_error=no_room,start_kv=fp16") as upstream:
        waiting = [asyncio.create_task(read_text(upstream, ask(CacheMode.MERGED, "fp16"))) for _ in range(3)]
        for task in waiting:
            with pytest.raises(ModeUnavailable, match="no room") as caught:
                await asyncio.wait_for(task, DEADLINE_SECONDS)
            assert caught.value.retry_after_seconds == 5.0
        with pytest.raises(ModeUnavailable, match=r"no room.*next try"):
            await read_text(upstream, ask(CacheMode.MERGED, "fp16"))

        assert "no room" in variant(upstream, "merged[fp16]").reason
        assert await read_text(upstream, ask(CacheMode.MERGED, "bf16")) == "one two "
        assert await read_text(upstream, ask(CacheMode.MERGED, "auto")) == "one two "


async def test_a_start_that_takes_too_long_is_ended_and_told():
    async with upstream_with_variants("start_delay=60,start_kv=fp16", ready_timeout_seconds=3.0) as upstream:
        task = asyncio.create_task(read_text(upstream, ask(CacheMode.MERGED, "fp16")))
        await until(lambda: pids(upstream, "merged[fp16]"))
        (pid,) = pids(upstream, "merged[fp16]")
        with pytest.raises(ModeUnavailable, match="not ready within 3 s"):
            await asyncio.wait_for(task, DEADLINE_SECONDS)

        await until(lambda: variant(upstream, "merged[fp16]").state == "stopped")
        assert not is_alive(pid)


async def test_a_killed_variant_ends_its_streams_and_comes_back_by_itself():
    async with upstream_with_variants() as upstream:
        stream = await start_reading(upstream, endless(CacheMode.MERGED, kv_cache_dtype="fp16"))
        (pid,) = pids(upstream, "merged[fp16]")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UpstreamGone, match=r"The merged\[fp16\] engine process is gone"):
            await asyncio.wait_for(stream, DEADLINE_SECONDS)

        back = lambda: variant(upstream, "merged[fp16]").instances[0].state == InstanceState.READY  # noqa: E731
        await until(lambda: pids(upstream, "merged[fp16]") not in ([], [pid]) and back())
        assert await read_text(upstream, ask(CacheMode.MERGED, "fp16")) == "one two "


async def test_a_variant_that_keeps_dying_is_stopped_with_the_reason():
    policy = Policy(first_restart_seconds=0.01, max_restarts=0)
    async with upstream_with_variants("bug=boom", policy=policy) as upstream:
        with pytest.raises(UpstreamGone):
            await read_text(upstream, ask(CacheMode.MERGED, "fp16", "boom"))
        await until(lambda: variant(upstream, "merged[fp16]").state == "stopped")

        with pytest.raises(ModeUnavailable, match="exited with code 70"):
            await read_text(upstream, ask(CacheMode.MERGED, "fp16"))


async def test_closing_lets_a_variants_stream_finish_and_leaves_no_process():
    async with upstream_with_variants(modes=(CacheMode.SPLIT,)) as upstream:
        request = make_request(CacheMode.SPLIT, "a b", kv_cache_dtype="fp16", max_tokens=100)
        stream = await start_reading(upstream, request)
        alive = pids(upstream, "split[fp16]")
        assert len(alive) == 2
        closing = asyncio.create_task(upstream.close())

        assert await stream == "a b " * 50
        await asyncio.wait_for(closing, DEADLINE_SECONDS)
        assert not any(map(is_alive, alive))
        with pytest.raises(ModeUnavailable):
            await read_text(upstream, ask(CacheMode.SPLIT, "fp16"))


async def test_closing_while_a_variant_starts_ends_it_and_tells_who_waits():
    async with upstream_with_variants("start_delay=60,start_kv=fp16") as upstream:
        task = asyncio.create_task(read_text(upstream, ask(CacheMode.MERGED, "fp16")))
        await until(lambda: pids(upstream, "merged[fp16]"))
        (pid,) = pids(upstream, "merged[fp16]")
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)

        with pytest.raises(ModeUnavailable, match="shutting down"):
            await task
        assert not is_alive(pid)


async def test_a_stream_of_a_variant_that_is_closed_early_gives_its_place_back():
    async with upstream_with_variants() as upstream:
        async with aclosing(upstream.stream(endless(CacheMode.MERGED, kv_cache_dtype="fp16"))) as events:
            assert isinstance(await anext(events), Started)
            assert variant(upstream, "merged[fp16]").num_requests == 1

        assert variant(upstream, "merged[fp16]").num_requests == 0


async def test_before_the_main_engine_was_ready_no_variant_is_started_in_its_place():
    async with running_upstream(
        "start_delay=60",
        modes=(CacheMode.MERGED,),
        wait_ready=False,
        engine_options={"kv_cache_variants": ("fp32",)},
    ) as upstream:
        with pytest.raises(ModeUnavailable, match="merged is starting"):
            await read_text(upstream, ask(CacheMode.MERGED, "fp32"))
        assert variant(upstream, "merged[fp32]").state == "stopped"
