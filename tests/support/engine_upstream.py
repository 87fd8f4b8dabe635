"""An `EngineUpstream` over real processes of the scripted engine, and short ways to ask it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from backends.protocol.messages import ChatPrompt, SamplingParams
from gateway.core.types import CacheMode, CacheStrategy, ChatRequest, Finished, StrategySource, TextDelta
from gateway.routing.instance_choice import InstanceChoice
from gateway.settings.schema import (
    CacheLayoutSettings,
    EngineSettings,
    KVCacheSettings,
    SchedulerSettings,
    Settings,
    TimeoutSettings,
    TransferSettings,
)
from gateway.upstreams.engine.process import COMMAND
from gateway.upstreams.engine.supervisor import InstanceReport, Policy
from gateway.upstreams.engine.upstream import EngineUpstream

DEADLINE_SECONDS = 20.0
QUICK = Policy(first_restart_seconds=0.05, exit_seconds=5.0)
_ids = itertools.count()


@asynccontextmanager
async def running_upstream(
    script: str = "",
    *,
    modes: tuple[CacheMode, ...] = tuple(CacheMode),
    policy: Policy = QUICK,
    wait_ready: bool = True,
    shutdown_seconds: float = 5.0,
    engine_options: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    lease_seconds: float = 10.0,
    num_cores: int = 1,
    command: Sequence[str] = COMMAND,
    **scheduler: int,
) -> AsyncIterator[EngineUpstream]:
    settings = Settings(
        timeouts=TimeoutSettings(shutdown_seconds=shutdown_seconds),
        kv_cache=KVCacheSettings(num_kv_blocks=1024),
        scheduler=SchedulerSettings(**scheduler),
        cache_layout=CacheLayoutSettings(**(layout or {})),
        transfer=TransferSettings(lease_seconds=lease_seconds),
    )
    engine = EngineSettings(model=f"scripted:{script}", device="cpu", modes=modes, **(engine_options or {}))
    upstream = EngineUpstream(
        settings, engine, make_chooser=InstanceChoice, policy=policy, command=command, num_cores=num_cores
    )
    await upstream.start()
    try:
        if wait_ready:
            await asyncio.wait_for(upstream.wait_ready(), DEADLINE_SECONDS)
        yield upstream
    finally:
        await asyncio.wait_for(upstream.close(), DEADLINE_SECONDS)


def make_request(mode: CacheMode, text: str = "a b c", *, kv_cache_dtype: str = "auto", **sampling: Any) -> ChatRequest:
    return ChatRequest(
        request_id=f"request-{next(_ids)}",
        model="scripted",
        prompt=ChatPrompt(messages=[{"role": "user", "content": text}]),
        sampling=SamplingParams(**sampling),
        strategy=CacheStrategy(mode, StrategySource.DEFAULT, kv_cache_dtype=kv_cache_dtype),
        stream=True,
    )


def endless(mode: CacheMode, text: str = "a b c", *, kv_cache_dtype: str = "auto") -> ChatRequest:
    return make_request(mode, text, kv_cache_dtype=kv_cache_dtype, max_tokens=5000, ignore_eos=True)


async def read_text(upstream: EngineUpstream, request: ChatRequest, first: asyncio.Event | None = None) -> str:
    """The whole answer; raises what the stream raises, and AssertionError if it ends without having finished."""
    pieces: list[str] = []
    finished = False
    async with aclosing(upstream.stream(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                pieces.append(event.text)
                if first is not None:
                    first.set()
            finished = isinstance(event, Finished)
    assert finished
    return "".join(pieces)


async def start_reading(upstream: EngineUpstream, request: ChatRequest) -> asyncio.Task[str]:
    """A reader that has seen the first text of its answer."""
    first = asyncio.Event()
    task = asyncio.create_task(read_text(upstream, request, first))
    waiter = asyncio.create_task(first.wait())
    await asyncio.wait({task, waiter}, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    assert first.is_set(), "no text came"
    return task


def report(upstream: EngineUpstream, role: str) -> InstanceReport:
    return next(report for report in upstream.ready_state() if report.role == role)


async def blocks_in_use(upstream: EngineUpstream) -> dict[str, int]:
    return {role: stats.num_blocks_in_use for role, stats in (await upstream.stats()).items()}


async def until_no_blocks_in_use(upstream: EngineUpstream) -> None:
    """Within a second, as the streams' ends are told."""
    async with asyncio.timeout(1.0):
        while any((await blocks_in_use(upstream)).values()):
            pass
