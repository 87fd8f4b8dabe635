"""One engine measured from start to stop, and the order of all of them. Knows no terminal and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gateway.bench.engines.figures import MEASURES, MEMORY, Server, Unsupported
from gateway.bench.engines.launch import Launch
from gateway.bench.engines.results import EngineRun
from gateway.bench.engines.samples import CompletionClient
from gateway.bench.engines.sizes import Prompts, Sizes
from gateway.bench.measure import Clock
from gateway.bench.memory import PROC, Memory, largest_of_tree, memory_of
from gateway.bench.probing import PROBE_TIMEOUT, answers
from gateway.bench.process import BenchError, ServerProcess, free_port, running
from gateway.bench.runner import Progress
from gateway.bench.workload import token_id_range

# Of what an instance of the bundled engine says of itself, what its figures depend on.
TELLING = ("weight_dtype", "kv_cache_dtype", "kv_bytes_per_token", "block_size", "num_blocks", "num_threads", "device")
MIB = 2**20


class Bench:
    """What all engines have in common."""

    def __init__(
        self,
        *,
        rows: Sequence[str],
        num_repeats: int,
        sizes: Sizes,
        seed: int,
        ready_seconds: float,
        work: Path,
        progress: Progress,
        clock: Clock = time.perf_counter,
        proc: Path = PROC,
    ) -> None:
        self._rows = rows
        self._num_repeats = num_repeats
        self._sizes = sizes
        self._seed = seed
        self._ready_seconds = ready_seconds
        self._work = work
        self._progress = progress
        self._clock = clock
        self._proc = proc
        self._ids = token_id_range(None)

    async def run(self, launch: Launch, *, is_own: bool) -> EngineRun:
        """Never raises for what a server does: what went wrong is in the result."""
        port = free_port()
        run = EngineRun(
            name=launch.name,
            is_own=is_own,
            version=launch.version,
            command=launch.command(port),
            weights=launch.weights,
            note=launch.note,
        )
        try:
            await self._run(launch, run, f"http://127.0.0.1:{port}")
        except BenchError as error:
            run.failure = str(error)
        return run

    async def _run(self, launch: Launch, run: EngineRun, url: str) -> None:
        log = self._work / f"{launch.name}.log"
        # No limit on connections: it would queue requests after the clock has started.
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            running(run.command, launch.environ, log) as process,
        ):
            started_at = self._clock()
            self._progress.begin(f"{launch.name}: starting", 1)
            await process.wait_ready(lambda: answers(session, url + launch.ready_path), self._ready_seconds)
            self._progress.advance(failed=False)
            self._progress.end()
            run.ready_seconds = self._clock() - started_at
            instance = await own_instance(session, url) if run.is_own else {}
            self._learn(run, instance)
            run.footprint = launch.footprint(instance) if launch.footprint is not None else None
            client = CompletionClient(session, url, await served_model(session, url), self._clock)
            server = Server(client, Prompts(self._seed, self._ids), self._sizes, launch.max_streams)
            await self._measure_all(server, run, process)
            run.memory = self._memory(instance.get("pid"), process)
            self._add_memory(run)

    def _learn(self, run: EngineRun, instance: dict[str, Any]) -> None:
        """What the bundled engine says decides which ids are sent, to the peers after it too."""
        if instance:
            run.facts = {name: instance.get(name) for name in TELLING}
            self._ids = token_id_range(instance.get("vocab_size"))

    async def _measure_all(self, server: Server, run: EngineRun, process: ServerProcess) -> None:
        await warm_up(server)
        for name in [row for row in self._rows if row in MEASURES]:
            self._progress.begin(f"{run.name}: {name}", self._num_repeats)
            await self._measure(name, server, run)
            self._progress.end()
            if name in run.problems:
                await process.settle()
            process.require_alive()

    async def _measure(self, name: str, server: Server, run: EngineRun) -> None:
        for repeat in range(self._num_repeats):
            try:
                values = await MEASURES[name](server, repeat)
            except Unsupported as reason:
                run.unsupported[name] = str(reason)
                return
            except BenchError as error:
                run.problems[name] = str(error)
                self._progress.advance(failed=True)
                return
            for figure, value in values.items():
                run.values.setdefault(figure, []).append(value)
            self._progress.advance(failed=False)

    def _memory(self, engine_pid: int | None, process: ServerProcess) -> Memory | None:
        if engine_pid is not None:
            return memory_of(engine_pid, self._proc)
        return largest_of_tree(process.pid, self._proc)

    def _add_memory(self, run: EngineRun) -> None:
        if MEMORY not in self._rows:
            return
        if run.memory is None:
            run.unsupported[MEMORY] = "only Linux tells it"
            return
        run.values |= {"memory": [run.memory.rss_bytes / MIB], "memory-pss": [run.memory.pss_bytes / MIB]}


async def warm_up(server: Server) -> None:
    """Every shape that is measured, once: what a server prepares on first use belongs to no figure."""
    sizes, make = server.sizes, server.prompts.make
    for name, num_tokens in (
        ("short", sizes.short_prompt),
        ("medium", sizes.medium_prompt),
        ("long", sizes.long_prompt),
    ):
        await server.client.complete(make(num_tokens, "warm-up", name), sizes.load_output)


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model the server lists."""
    answer = await _get(session, f"{url}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise BenchError("/v1/models lists no model") from None


async def own_instance(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the bundled engine says of itself, wherever it stands in /ready."""
    return find_instance(await _get(session, f"{url}/ready")) or {}


def find_instance(answer: object) -> dict[str, Any] | None:
    """The first object that describes a merged instance."""
    if isinstance(answer, dict):
        if answer.get("role") == "merged" and "vocab_size" in answer:
            return answer
        return _first(find_instance, answer.values())
    return _first(find_instance, answer) if isinstance(answer, list) else None


def _first(find: Callable[[object], dict[str, Any] | None], values: Any) -> dict[str, Any] | None:
    return next((found for value in values if (found := find(value)) is not None), None)


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url, timeout=PROBE_TIMEOUT) as response:
            return msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise BenchError(f"{url}: {error or type(error).__name__}") from None
