"""What is measured of one gateway: each measure fills its part of the run. Knows no gateway by name.

Every measure sends the same requests directly and through the gateway in turn, so that what the machine does
meanwhile meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from pathlib import Path

from gateway.bench.gateways.asking import Client, Place, set_gap
from gateway.bench.gateways.own import LAG_SERIES, OwnGateway, buckets_of, quantile_between
from gateway.bench.gateways.results import Burst, GatewayRun, MemoryPoint, Pair, Round
from gateway.bench.gateways.sizes import Kind, Sizes
from gateway.bench.memory import PROC, memory_of_tree
from gateway.bench.process import BenchError
from gateway.bench.runner import Progress
from gateway.bench.tasks import all_or_first_error

NUM_STEPS = 20  # of a progress bar: drawn so seldom that it doesn't disturb


@dataclass(frozen=True, slots=True)
class Site:
    """What a measure may use."""

    client: Client
    direct: Place
    via: Place
    upstream_url: str
    sizes: Sizes
    random: random.Random
    progress: Progress
    pid: int  # of the gateway's first process
    own: OwnGateway | None = None  # this project's, which says more
    proc: Path = PROC


Measure = Callable[[Site, GatewayRun], Awaitable[None]]


def latency(kind: Kind) -> Measure:
    """One request at a time, directly and through the gateway, in random order within each pair."""

    async def measure(site: Site, run: GatewayRun) -> None:
        pairs: list[Pair] = []
        with quiet_collector():
            for _ in stepwise(site.progress, f"{run.name}: latency, {kind}", site.sizes.num_pairs):
                pairs.append(await ask_pair(site, kind, via_comes_first=site.random.random() < 0.5))
                run.num_requests += 1
        run.pairs[kind] = pairs

    return measure


async def ask_pair(site: Site, kind: Kind, *, via_comes_first: bool) -> Pair:
    if via_comes_first:
        via = await site.client.ask(site.via, kind)
        direct = await site.client.ask(site.direct, kind)
    else:
        direct = await site.client.ask(site.direct, kind)
        via = await site.client.ask(site.via, kind)
    return Pair(
        direct_first=direct.first,
        direct_whole=direct.whole,
        via_first=via.first,
        via_whole=via.whole,
        via_came_first=via_comes_first,
    )


def rate(kind: Kind) -> Measure:
    """Requests a second of a closed loop, in rounds."""

    async def measure(site: Site, run: GatewayRun) -> None:
        num_requests, rounds = site.sizes.num_round_requests, list[Round]()
        for _ in stepwise(site.progress, f"{run.name}: requests/s, {kind}", site.sizes.num_rounds):
            places = [site.direct, site.via]
            site.random.shuffle(places)
            seconds = {place: await closed_loop(site, place, repeat(kind, num_requests)) for place in places}
            rounds.append(Round(direct=num_requests / seconds[site.direct], via=num_requests / seconds[site.via]))
            run.num_requests += num_requests
        run.rounds[kind] = rounds

    return measure


async def closed_loop(site: Site, place: Place, kinds: Iterable[Kind]) -> float:
    """Seconds from the first request sent to the last answer ended."""
    waiting = iter(kinds)
    started_at = time.perf_counter()
    async with all_or_first_error() as group:
        for _ in range(site.sizes.num_lanes):
            group.create_task(_lane(site, place, waiting))
    return time.perf_counter() - started_at


async def _lane(site: Site, place: Place, waiting: Iterator[Kind]) -> None:
    for kind in waiting:
        await site.client.ask(place, kind)


async def memory(site: Site, run: GatewayRun) -> None:
    """Resident memory after the measures before, and while many more requests are answered."""
    points, marks = [memory_point(site, 0)], memory_marks(site.sizes)
    for index in stepwise(site.progress, f"{run.name}: memory", len(marks) - 1):
        num_requests = marks[index + 1] - marks[index]
        await closed_loop(site, site.via, islice(cycle(Kind), num_requests))
        run.num_requests += num_requests
        points.append(memory_point(site, marks[index + 1]))
    run.memory = [point for point in points if point is not None]
    if len(run.memory) < len(points):
        run.memory = []
        run.unsupported["memory"] = "only Linux tells it"


def memory_marks(sizes: Sizes) -> list[int]:
    """After how many requests memory is read, evenly spread."""
    num_points = min(sizes.num_memory_points, sizes.num_memory_requests)
    return [sizes.num_memory_requests * point // num_points for point in range(num_points + 1)]


def memory_point(site: Site, num_requests: int) -> MemoryPoint | None:
    known = memory_of_tree(site.pid, site.proc)
    if known is None:
        return None
    return MemoryPoint(num_requests=num_requests, rss_bytes=known.rss_bytes, pss_bytes=known.pss_bytes)


async def streams(site: Site, run: GatewayRun) -> None:
    """Many streams begun at once, with a gap between chunks so that all are open together."""
    site.progress.begin(f"{run.name}: {site.sizes.num_streams} streams at once", 2)
    await set_gap(site.client.session, site.upstream_url, site.sizes.stream_gap_seconds)
    try:
        direct = await burst(site, site.direct)
        site.progress.advance(failed=direct.num_errors > 0)
        if direct.num_errors:
            raise BenchError(f"the upstream itself failed {direct.num_errors} times: {direct.first_error}")
        run.direct_burst, before = direct, await site.own.metrics() if site.own else ""
        run.burst = await burst(site, site.via)
        if site.own:
            note_lag(run, before, await site.own.metrics())
        site.progress.advance(failed=run.burst.num_errors > 0)
    finally:
        await set_gap(site.client.session, site.upstream_url, 0.0)
        site.progress.end()
    run.num_requests += run.burst.num_streams - run.burst.num_errors


def note_lag(run: GatewayRun, before: str, after: str) -> None:
    """The p99 of its event loop's lag during the streams."""
    run.lag_p99_seconds = quantile_between(buckets_of(before, LAG_SERIES), buckets_of(after, LAG_SERIES), 99)
    if run.lag_p99_seconds is None:
        run.unsupported["event-loop lag"] = f"its /metrics has no histogram {LAG_SERIES}"


async def burst(site: Site, place: Place) -> Burst:
    """A failure is counted here: how many of them there are is what is measured."""
    await set_gap(site.client.session, site.upstream_url, site.sizes.stream_gap_seconds)
    started_at = time.perf_counter()
    outcomes = await asyncio.gather(*(_outcome(site, place) for _ in range(site.sizes.num_streams)))
    seconds = time.perf_counter() - started_at
    max_open = await set_gap(site.client.session, site.upstream_url, site.sizes.stream_gap_seconds)
    errors = [outcome for outcome in outcomes if outcome]
    return Burst(
        num_streams=site.sizes.num_streams,
        num_errors=len(errors),
        first_error=errors[0] if errors else "",
        max_open=max_open,
        seconds=seconds,
    )


async def _outcome(site: Site, place: Place) -> str:
    try:
        await site.client.ask(place, Kind.STREAM)
    except BenchError as error:
        return str(error)
    return ""


def stepwise(progress: Progress, label: str, total: int) -> Iterator[int]:
    """Counts to `total`, and shows a few steps of it. A bar left early has failed."""
    num_steps = min(NUM_STEPS, total)
    progress.begin(label, num_steps)
    shown = 0
    try:
        for done in range(total):
            yield done
            if (done + 1) * num_steps // total > shown:
                shown += 1
                progress.advance(failed=False)
    finally:
        if shown < num_steps:
            progress.advance(failed=True)
        progress.end()


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection of this process while single requests are timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# In this order: memory is read after the measures that load the gateway, and streams come last.
MEASURES: dict[str, tuple[str, Measure]] = {
    **{f"latency, {kind}": ("latency", latency(kind)) for kind in Kind},
    **{f"requests/s, {kind}": ("rate", rate(kind)) for kind in Kind},
    "memory": ("memory", memory),
    "streams": ("streams", streams),
}
