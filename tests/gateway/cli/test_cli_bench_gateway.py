"""`kvgate bench gateway` on the command line: options, refusals, and one run of the whole command."""

from __future__ import annotations

import argparse
import io
import json

import pytest

from gateway.bench.gateways import command
from gateway.bench.gateways.command import GatewayJob, execute
from gateway.bench.gateways.figures import ROWS
from gateway.bench.gateways.sizes import QUICK, Sizes
from gateway.bench.options import CompareError
from gateway.cli import bench, bench_gateway
from support.progress_log import ProgressLog

TINY = Sizes(
    num_chunks=4, num_warm_ups=1, num_pairs=2, num_lanes=2, num_rounds=1, num_round_requests=2, num_memory_requests=2,
    num_memory_points=1, num_streams=3, stream_gap_seconds=0.01,
)  # fmt: skip


def parsed(*argv):
    top = argparse.ArgumentParser(prog="kvgate")
    bench.add_parser(top.add_subparsers())
    return top.parse_args(["bench", *argv])


def job(*argv):
    return bench_gateway.job_from(parsed("gateway", *argv))


def test_without_options_everything_is_measured():
    assert job() == GatewayJob()
    assert job().sizes == Sizes()
    assert job().rows == ROWS


def test_every_option_reaches_the_run(tmp_path):
    target = tmp_path / "out.json"
    options = job(
        "--rows", "memory, latency", "--peers", "PORTKEY", "--requests", "7", "--quick", "--seed", "9",
        "--ready-timeout", "5", "--json", str(target), "--install-to", "p",
    )  # fmt: skip

    assert (options.rows, options.peers, options.seed) == (("latency", "memory"), ("portkey",), 9)
    assert (options.ready_seconds, options.json_target, str(options.peer_root)) == (5.0, str(target), "p")
    assert (options.sizes.num_pairs, options.sizes.num_memory_requests) == (QUICK.num_pairs, 7)
    assert job("--peers", "none").peers == ()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gateway", "--rows", "speed"], "--rows 'speed': 'speed' is none of latency, rate"),
        (["gateway", "--peers", "nginx"], "--peers 'nginx': 'nginx' is none of litellm, portkey"),
        (["gateway", "--install", "nginx"], "--install 'nginx': 'nginx' is none of litellm, portkey"),
        (["gateway", "--json", "/no/such/folder/x.json"], "not a file in an existing folder"),
        (["--quick", "gateway"], "--quick comes after the word gateway"),
        (["--install-to", "x", "gateway"], "--install-to comes after the word gateway"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(argv, words, capsys):
    arguments = parsed(*argv)
    assert arguments.run(arguments) == bench_gateway.EXIT_BAD_OPTIONS
    assert words in capsys.readouterr().err


def test_engines_are_still_what_bench_measures():
    assert parsed("--quick").run is bench.run
    assert parsed("gateway", "--quick").run is bench_gateway.run
    with pytest.raises(CompareError, match="'gateway' is none of"):
        bench.job_from(parsed("--rows", "gateway"))


async def executed(monkeypatch, tmp_path, **changes):
    monkeypatch.setattr(command, "QUICK", TINY)
    stdout, stderr = io.StringIO(), io.StringIO()
    options = GatewayJob(is_quick=True, peer_root=tmp_path, **changes)
    code = await execute(options, ProgressLog(), stdout=stdout, stderr=stderr)
    return code, stdout.getvalue(), stderr.getvalue()


async def test_the_real_gateway_over_the_real_upstream_with_missing_peers(monkeypatch, tmp_path):
    """It counts and records each request, or this would fail."""
    code, stdout, stderr = await executed(monkeypatch, tmp_path, json_target=str(tmp_path / "out.json"))

    assert code == 0, stdout + stderr
    assert [name for name in ("litellm", "portkey", "vllm-router") if f"missing: {name}" not in stdout] == []
    assert stderr.count("install it with") == 3
    runs = json.loads((tmp_path / "out.json").read_text())["result"]["runs"]
    assert [run["name"] for run in runs] == ["kvgate"]
    assert (len(runs[0]["pairs"]["stream"]), runs[0]["burst"]["num_errors"]) == (2, 0)


async def test_a_gateway_that_cannot_start_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("KVGATE_SERVER__HOST", "no such host")
    code, stdout, _ = await executed(monkeypatch, tmp_path, peers=())

    assert code == 1
    assert "FAILED: kvgate: " in stdout


async def test_an_upstream_that_cannot_start_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "UPSTREAM", ("/no/such/program",))
    code, stdout, stderr = await executed(monkeypatch, tmp_path)

    assert (code, stdout) == (2, "")
    assert "/no/such/program can't be started" in stderr
