"""One gateway from start to stop: readiness, warm-up, every measure. Knows no terminal and prints nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from gateway.bench.gateways.asking import Client, Place
from gateway.bench.gateways.launch import GatewayLaunch
from gateway.bench.gateways.measures import MEASURES, Site
from gateway.bench.gateways.own import OwnGateway
from gateway.bench.gateways.results import GatewayRun
from gateway.bench.gateways.sizes import Kind, Sizes
from gateway.bench.memory import PROC
from gateway.bench.probing import answers
from gateway.bench.process import BenchError, ServerProcess, free_port, running
from gateway.bench.runner import Progress

# A proxy of the environment must not come between a gateway and an upstream on this machine.
NO_PROXY = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

IDLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class GatewayBench:
    """What all gateways have in common."""

    rows: Sequence[str]
    sizes: Sizes
    seed: int
    ready_seconds: float
    work: Path
    progress: Progress
    upstream_url: str
    proc: Path = PROC

    async def run(self, launch: GatewayLaunch, *, is_own: bool) -> GatewayRun:
        """Never raises for what a gateway does: what went wrong is in the result."""
        port = free_port()
        command = launch.command(port)
        run = GatewayRun(name=launch.name, is_own=is_own, version=launch.version, command=command, note=launch.note)
        try:
            await self._run(launch, run, f"http://127.0.0.1:{port}")
        except BenchError as error:
            run.failure = str(error)
        return run

    async def _run(self, launch: GatewayLaunch, run: GatewayRun, url: str) -> None:
        log = self.work / f"{launch.name}.log"
        # No limit on connections: it would queue requests after the clock has started. An idle one is closed before
        # servers do it (after 5 s, many of them), or a request could meet the closing.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session,
            running(run.command, {**NO_PROXY, **launch.environ}, log) as process,
        ):
            started_at = time.perf_counter()
            self.progress.begin(f"{run.name}: starting", 1)
            await process.wait_ready(lambda: answers(session, url + launch.ready_path), self.ready_seconds)
            self.progress.advance(failed=False)
            self.progress.end()
            run.ready_seconds = time.perf_counter() - started_at
            own = OwnGateway(session, url, launch.headers) if run.is_own else None
            site = self._site(session, launch, url, process.pid, own)
            await self._measure_all(site, run, process)

    def _site(
        self, session: aiohttp.ClientSession, launch: GatewayLaunch, url: str, pid: int, own: OwnGateway | None
    ) -> Site:
        chat = "/v1/chat/completions"
        return Site(
            client=Client(session, self.sizes.num_chunks),
            direct=Place("direct", self.upstream_url + chat),
            via=Place(launch.name, url + chat, launch.headers),
            upstream_url=self.upstream_url,
            sizes=self.sizes,
            random=random.Random(self.seed),
            progress=self.progress,
            pid=pid,
            own=own,
            proc=self.proc,
        )

    async def _measure_all(self, site: Site, run: GatewayRun, process: ServerProcess) -> None:
        await warm_up(site, run)
        for name, (row, _) in MEASURES.items():
            if row not in self.rows:
                continue
            await self._measure(name, site, run, process)
            process.require_alive()
        if site.own is not None and not run.problems:
            await site.own.require_counted(run.num_requests)

    async def _measure(self, name: str, site: Site, run: GatewayRun, process: ServerProcess) -> None:
        try:
            await MEASURES[name][1](site, run)
        except BenchError as error:
            run.problems[name] = str(error)
            await process.settle()


async def warm_up(site: Site, run: GatewayRun) -> None:
    """Each kind, read event by event. A kind that fails has its problem said by its measures, unless both do."""
    failures: list[BenchError] = []
    for kind in Kind:
        try:
            for index in range(site.sizes.num_warm_ups):
                await site.client.ask_and_read(site.direct, kind)
                request_id = await site.client.ask_and_read(site.via, kind)
                run.num_requests += 1
                if site.own is not None and index == 0:
                    await site.own.require_record(request_id)
        except BenchError as error:
            failures.append(error)
            run.problems[f"warm-up, {kind}"] = str(error)
    if len(failures) == len(Kind):
        raise failures[0]
