"""Servers that are started are stopped, with all they started, however the run ends. Against a small real program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.bench import process as process_module
from gateway.bench.engines.launch import Launch
from gateway.bench.engines.roofline import Footprint
from gateway.bench.engines.runs import Bench
from gateway.bench.engines.sizes import Sizes
from gateway.bench.process import running
from support.gateway_process import is_alive, wait_until

FAKE_SERVER = Path(__file__).with_name("bench_fake_server.py")
TINY = Sizes(
    short_prompt=2, medium_prompt=4, long_prompt=8, load_prompt=3, decode_output=4, long_decode_output=3, load_output=2,
    num_streams=2, num_load_requests=4, num_stalled_streams=2, stream_warm_up=1, stream_quiet=3, stream_output=100_000,
)  # fmt: skip
ROOT = Path(__file__).parents[3]


class SilentProgress:
    def __init__(self):
        self.labels: list[str] = []

    def begin(self, label, total):
        self.labels.append(label)

    def advance(self, *, failed):
        pass

    def end(self):
        pass


def command(tmp_path, *flags, port=0):
    return [sys.executable, str(FAKE_SERVER), "--port", str(port), "--pids", str(tmp_path / "pids"), *flags]


def pids(tmp_path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def bench(tmp_path, rows, **options):
    return Bench(
        rows=rows, num_repeats=2, sizes=TINY, seed=1, ready_seconds=options.pop("ready_seconds", 20.0), work=tmp_path,
        progress=options.pop("progress", SilentProgress()),
    )  # fmt: skip


def launch(tmp_path, *flags, name="fake", **options):
    return Launch(name, lambda port: command(tmp_path, *flags, port=port), "1.0", ready_path="/ready", **options)


async def written(tmp_path) -> bool:
    return (tmp_path / "pids").exists()


async def test_a_server_is_gone_after_its_block(tmp_path):
    async with running(command(tmp_path), {}, tmp_path / "log") as server:
        await server.wait_ready(lambda: written(tmp_path), 20)
        assert is_alive(server.pid)

    assert not is_alive(server.pid)


async def test_a_server_and_a_child_that_ignore_the_request_to_end_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "STOP_SECONDS", 0.05)

    async with running(command(tmp_path, "--ignores-term", "--child"), {}, tmp_path / "log") as server:
        await server.wait_ready(lambda: written(tmp_path), 20)

    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")


async def test_a_child_is_killed_even_if_the_server_ends_by_itself(tmp_path):
    async with running(command(tmp_path, "--child"), {}, tmp_path / "log") as server:
        await server.wait_ready(lambda: written(tmp_path), 20)

    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")


async def test_an_error_in_the_block_stops_the_server_too(tmp_path):
    async def fail():
        async with running(command(tmp_path, "--child"), {}, tmp_path / "log") as server:
            await server.wait_ready(lambda: written(tmp_path), 20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")


async def test_a_server_that_dies_at_start_is_explained_by_its_own_words(tmp_path):
    run = await bench(tmp_path, ["decode"]).run(launch(tmp_path, "--fails"), is_own=True)

    assert "ended with status 1" in run.failure
    assert "no weights here" in run.failure


async def test_a_server_that_is_never_ready_is_given_up_and_stopped(tmp_path):
    run = await bench(tmp_path, ["decode"], ready_seconds=1.0).run(launch(tmp_path, "--never-ready"), is_own=True)

    assert run.failure.startswith("not ready within 1 s")
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")


async def test_a_program_that_is_not_there_is_a_failure_of_that_engine_alone(tmp_path):
    run = await bench(tmp_path, ["decode"]).run(Launch("x", lambda _: ["/no/such/program"], "1"), is_own=False)

    assert run.failure == "/no/such/program can't be started: No such file or directory"


async def test_every_row_gets_as_many_values_as_repeats(tmp_path):
    progress = SilentProgress()
    rows = ["decode", "decode-long", "prefill", "prefill-long", "load", "load-long", "stall", "prefix", "memory"]
    own = launch(
        tmp_path, "--gap", "0.01", footprint=lambda info: Footprint(weight_bytes=1, kv_bytes_per_token=len(info))
    )
    run = await bench(tmp_path, rows, progress=progress).run(own, is_own=True)

    assert (run.failure, run.problems, run.unsupported) == ("", {}, {})
    assert {len(values) for name, values in run.values.items() if not name.startswith("memory")} == {2}
    assert all(value > 0 for values in run.values.values() for value in values)
    assert run.memory is not None
    assert run.memory.pid == pids(tmp_path)[0]
    assert run.facts["weight_dtype"] == "bf16"
    assert run.footprint == Footprint(weight_bytes=1, kv_bytes_per_token=4)
    assert progress.labels == ["fake: starting", *[f"fake: {row}" for row in rows[:-1]]]


async def test_a_server_without_its_own_figures_is_measured_by_the_largest_process_of_its_tree(tmp_path):
    shared = bench(tmp_path, ["memory"])
    await shared.run(launch(tmp_path), is_own=True)  # from it the ids are known that may be sent
    run = await shared.run(launch(tmp_path, "--child", name="peer"), is_own=False)

    assert run.memory is not None
    assert run.memory.pid in pids(tmp_path)
    assert run.facts == {}


async def test_a_server_that_dies_while_it_is_measured_keeps_what_it_had(tmp_path):
    # 3 warm-up requests, 2 of decode, then it is gone. With a gap, answers come in pieces on a busy machine too.
    dying = launch(tmp_path, "--ends-at", "6", "--gap", "0.05")
    run = await bench(tmp_path, ["decode", "prefill", "load"]).run(dying, is_own=True)

    assert len(run.values["decode"]) == 2
    assert "connection" in run.problems["prefill"]
    assert "ended with status 3" in run.failure
    assert "load" not in run.problems


async def test_one_at_a_time_is_said_not_failed(tmp_path):
    run = await bench(tmp_path, ["stall"]).run(launch(tmp_path, max_streams=1), is_own=True)

    assert (run.unsupported, run.problems) == ({"stall": "it answers 1 at a time"}, {})


DRIVER = """
import asyncio, sys
from pathlib import Path
from gateway.bench.engines import command
from gateway.bench.engines.runs import Bench
sys.path[:0] = {folders!r}
from test_bench_engines_process import SilentProgress, bench, launch

async def execute(job, progress, *, stdout, stderr):
    await bench(Path({work!r}), ["decode"], ready_seconds=60.0).run(launch(Path({work!r}), *{flags!r}), is_own=True)
    return 0

command.execute = execute
sys.exit(command.run_job(command.BenchJob(), SilentProgress()))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_before_the_command_ends(tmp_path, number):
    folders = [str(FAKE_SERVER.parent), str(ROOT / "tests")]
    code = DRIVER.format(folders=folders, work=str(tmp_path), flags=("--never-ready", "--child"))
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "pids").exists, "the first process runs")
        os.kill(driver.pid, number)
        _, stderr = driver.communicate(timeout=60)
    finally:
        driver.kill()

    assert driver.returncode == 130
    assert "interrupted; every server it started is stopped" in stderr
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")


async def test_cancelling_while_a_row_is_measured_stops_the_server(tmp_path):
    task = asyncio.create_task(bench(tmp_path, ["decode"]).run(launch(tmp_path, "--gap", "600"), is_own=True))
    await asyncio.to_thread(wait_until, (tmp_path / "pids").exists, "the server runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), "every process has ended")
