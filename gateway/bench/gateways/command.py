"""`kvgate bench gateway` from options to a written result: the upstream, which gateways, in which order."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import aiohttp

from gateway.bench.environments import DEFAULT_FOLDER, Missing
from gateway.bench.facts import machine_facts, own_version
from gateway.bench.gateways.figures import ROWS
from gateway.bench.gateways.install import PEERS
from gateway.bench.gateways.launch import GatewayLaunch, find_peers, launch_own
from gateway.bench.gateways.results import GatewayResult
from gateway.bench.gateways.runs import GatewayBench
from gateway.bench.gateways.sizes import QUICK, Sizes
from gateway.bench.gateways.table import render, to_json
from gateway.bench.probing import answers
from gateway.bench.process import BenchError, ServerProcess, free_port, running
from gateway.bench.runner import Progress
from gateway.bench.terminal import EXIT_CANNOT, EXIT_CLEAN, EXIT_FAILED, run_interruptible, write_result

UPSTREAM = (sys.executable, "-m", "gateway.bench.gateways.upstream")
UPSTREAM_READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GatewayJob:
    """Checked options."""

    rows: tuple[str, ...] = ROWS
    peers: tuple[str, ...] = tuple(PEERS)
    num_requests: int | None = None  # of the memory row; None = as the sizes say
    is_quick: bool = False
    seed: int = 1
    ready_seconds: float = 120.0
    peer_root: Path = DEFAULT_FOLDER
    json_target: str | None = None

    @property
    def sizes(self) -> Sizes:
        sizes = QUICK if self.is_quick else Sizes()
        return sizes if self.num_requests is None else replace(sizes, num_memory_requests=self.num_requests)


def run_job(job: GatewayJob, progress: Progress) -> int:
    """`execute` from a terminal."""
    return run_interruptible(lambda: execute(job, progress, stdout=sys.stdout, stderr=sys.stderr))


async def execute(job: GatewayJob, progress: Progress, *, stdout: TextIO, stderr: TextIO) -> int:
    """The exit code. What could be measured is written even if something else failed."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as work:
            result = await measure_all(job, Path(work), progress, stderr)
        document = to_json(result) if job.json_target is not None else ""  # thousands of resamples
        write_result(job.json_target, document=document, table=render(result), stdout=stdout)
    except BenchError as error:
        stderr.write(f"kvgate bench gateway: {error}\n")
        return EXIT_CANNOT
    return EXIT_FAILED if result.has_failed else EXIT_CLEAN


async def measure_all(job: GatewayJob, work: Path, progress: Progress, stderr: TextIO) -> GatewayResult:
    """This project, every peer, this project again: what changes between its two runs is the machine."""
    facts = {**machine_facts(), "timer": timer_text()}
    async with upstream_server(job.sizes, work) as (url, process):
        own = launch_own(work, url, own_version())
        found = find_peers(job.peers, job.peer_root, work, url)
        missing = {peer.name: peer.reason for peer in found if isinstance(peer, Missing)}
        for name, reason in missing.items():
            stderr.write(f"kvgate bench gateway: {name}: {reason}\n")
        result = GatewayResult(
            rows=list(job.rows), sizes=job.sizes, is_quick=job.is_quick, seed=job.seed, facts=facts, missing=missing
        )
        bench = GatewayBench(
            rows=job.rows,
            sizes=job.sizes,
            seed=job.seed,
            ready_seconds=job.ready_seconds,
            work=work,
            progress=progress,
            upstream_url=url,
        )
        peers = [peer for peer in found if isinstance(peer, GatewayLaunch)]
        await run_in_order(bench, own, peers, result, process)
    return result


async def run_in_order(
    bench: GatewayBench,
    own: GatewayLaunch,
    peers: Sequence[GatewayLaunch],
    result: GatewayResult,
    upstream: ServerProcess,
) -> None:
    """Without peers there is nothing that a drift could distort, so the second own run is left out."""
    order = [own, *peers, own] if peers else [own]
    for launch in order:
        run = await bench.run(launch, is_own=launch is own)
        upstream.require_alive()
        result.runs.append(run)
        if launch is own and run.failure:
            return  # nothing to compare the rest with


@contextlib.asynccontextmanager
async def upstream_server(sizes: Sizes, work: Path) -> AsyncGenerator[tuple[str, ServerProcess], None]:
    """The one upstream of all gateways, in a process of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*UPSTREAM, "--port", str(port), "--chunks", str(sizes.num_chunks)]
    async with running(command, {}, work / "upstream.log") as process:
        async with aiohttp.ClientSession() as session:
            await process.wait_ready(lambda: answers(session, f"{url}/health"), UPSTREAM_READY_SECONDS)
        yield url, process


def timer_text() -> str:
    """What the clock can tell apart: what it says of itself, and the smallest step that is seen."""
    steps = [later - earlier for earlier, later in (two_readings() for _ in range(1000)) if later > earlier]
    said = time.get_clock_info("perf_counter").resolution
    return f"resolution {said * 1e9:.0f} ns, smallest step seen {min(steps, default=0.0) * 1e9:.0f} ns"


def two_readings() -> tuple[float, float]:
    return time.perf_counter(), time.perf_counter()
