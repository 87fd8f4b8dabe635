"""`kvgate bench` from options to a written result: what is there, in which order it runs, what comes out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from gateway.bench.engines.figures import ROWS
from gateway.bench.engines.install import LLAMA, VLLM
from gateway.bench.engines.launch import Launch, find_environment, launch_llama, launch_own, launch_vllm
from gateway.bench.engines.results import BenchResult
from gateway.bench.engines.roofline import Machine, fastest, read_shape
from gateway.bench.engines.runs import Bench
from gateway.bench.engines.sizes import QUICK, Sizes
from gateway.bench.engines.table import render, to_json
from gateway.bench.environments import DEFAULT_FOLDER, Missing
from gateway.bench.facts import machine_facts, own_version
from gateway.bench.process import BenchError
from gateway.bench.runner import Progress
from gateway.bench.terminal import EXIT_CANNOT, EXIT_CLEAN, EXIT_FAILED, run_interruptible, write_result

# Modules of the engine that run in processes of their own: nothing of them is imported here.
MODEL_COMMAND = (sys.executable, "-m", "backends.models.cli")
MACHINE_COMMAND = (sys.executable, "-m", "backends.machine")


@dataclass(frozen=True, slots=True)
class BenchJob:
    """Checked options."""

    model: str = "smollm2"
    rows: tuple[str, ...] = ROWS
    peers: tuple[str, ...] = (VLLM.name, LLAMA.name)
    num_repeats: int = 3
    is_quick: bool = False
    seed: int = 1
    ready_seconds: float = 600.0
    vllm: Path | None = None
    llama: Path | None = None
    peer_root: Path = DEFAULT_FOLDER
    json_target: str | None = None

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.is_quick else Sizes()


def run_job(job: BenchJob, progress: Progress) -> int:
    """`execute` from a terminal."""
    return run_interruptible(lambda: execute(job, progress, stdout=sys.stdout, stderr=sys.stderr))


async def execute(job: BenchJob, progress: Progress, *, stdout: TextIO, stderr: TextIO) -> int:
    """The exit code. What could be measured is written even if something else failed."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as work:
            result = await measure_all(job, Path(work), progress, stderr)
        write_result(job.json_target, document=to_json(result), table=render(result), stdout=stdout)
    except BenchError as error:
        stderr.write(f"kvgate bench: {error}\n")
        return EXIT_CANNOT
    return EXIT_FAILED if result.has_failed else EXIT_CLEAN


async def measure_all(job: BenchJob, work: Path, progress: Progress, stderr: TextIO) -> BenchResult:
    """This project, every peer, this project again: what changes between its two runs is the machine."""
    facts = machine_facts()
    folder = Path((await run_json([*MODEL_COMMAND, "pull", "--json", job.model]))["path"])
    shape = read_shape(folder)
    own = launch_own(job.model, folder, shape, work, own_version())
    found = await find_peers(job, folder, work)
    peers = [peer for peer in found if isinstance(peer, Launch)]
    missing = {peer.name: peer.reason for peer in found if isinstance(peer, Missing)}
    for name, reason in missing.items():
        stderr.write(f"kvgate bench: {name}: {reason}\n")
    before = await machine_speed()
    result = BenchResult(
        rows=list(job.rows),
        num_repeats=1 if job.is_quick else job.num_repeats,
        is_quick=job.is_quick,
        seed=job.seed,
        sizes=job.sizes,
        machine=before,
        shape=shape,
        facts=facts,
        missing=missing,
    )
    bench = Bench(
        rows=result.rows,
        num_repeats=result.num_repeats,
        sizes=result.sizes,
        seed=result.seed,
        ready_seconds=job.ready_seconds,
        work=work,
        progress=progress,
    )
    await run_in_order(bench, own, peers, result)
    # Once more, minutes later: a bound is the best that was ever seen of this machine.
    result.machine = fastest(before, await machine_speed())
    return result


async def run_in_order(bench: Bench, own: Launch, peers: Sequence[Launch], result: BenchResult) -> None:
    """Without peers there is nothing that a drift could distort, so the second own run is left out."""
    order = [own, *peers, own] if peers else [own]
    for launch in order:
        run = await bench.run(launch, is_own=launch is own)
        result.runs.append(run)
        if launch is own and run.failure:
            return  # nothing to compare the rest with


async def machine_speed() -> Machine:
    return msgspec.convert(await run_json(MACHINE_COMMAND), Machine)


async def find_peers(job: BenchJob, folder: Path, work: Path) -> list[Launch | Missing]:
    """Each peer that was asked for, ready to start or with the reason why it isn't."""
    shape = read_shape(folder)
    found: list[Launch | Missing] = []
    if VLLM.name in job.peers:
        place = find_environment(job.vllm, VLLM, job.peer_root)
        found.append(place if isinstance(place, Missing) else launch_vllm(place, folder, shape, work))
    if LLAMA.name in job.peers:
        place = find_environment(job.llama, LLAMA, job.peer_root)
        found.append(place if isinstance(place, Missing) else await _llama_with_file(job, folder, place))
    return found


async def _llama_with_file(job: BenchJob, folder: Path, environment: Path) -> Launch | Missing:
    try:
        gguf = Path((await run_json([*MODEL_COMMAND, "pull", "--gguf", "--json", job.model]))["path"])
    except BenchError as error:
        return Missing(LLAMA.name, f"no GGUF file of {job.model}: {error}")
    return launch_llama(environment, gguf, read_shape(folder))


async def run_json(command: Sequence[str]) -> dict[str, str]:
    """What a command prints, as JSON; its own words go to standard error. It ends with this task."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        printed, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        raise BenchError(f"{' '.join(command[2:])} failed with status {process.returncode}")
    answer: dict[str, str] = json.loads(printed)
    return answer
