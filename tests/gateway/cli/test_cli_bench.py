"""`kvgate bench` on the command line: options and refusals. Nothing is started."""

from __future__ import annotations

import argparse

import pytest

from gateway.bench.engines.command import BenchJob
from gateway.bench.engines.figures import ROWS
from gateway.bench.engines.sizes import QUICK, Sizes
from gateway.bench.options import CompareError
from gateway.cli import bench


def parsed(*argv):
    top = argparse.ArgumentParser(prog="kvgate")
    bench.add_parser(top.add_subparsers())
    return top.parse_args(["bench", *argv])


def job(*argv):
    return bench.job_from(parsed(*argv))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (bench.VLLM_VARIABLE, bench.LLAMA_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_without_options_everything_is_measured():
    assert job() == BenchJob()
    assert job().sizes == Sizes()
    assert job().rows == ROWS


def test_every_option_reaches_the_run(tmp_path):
    target = tmp_path / "out.json"
    options = job(
        "--model", "m", "--rows", "stall, decode", "--peers", "LLAMA.CPP", "--repeats", "5", "--quick", "--seed", "9",
        "--vllm", str(tmp_path), "--llama", "l", "--ready-timeout", "7", "--json", str(target), "--install-to", "p",
    )  # fmt: skip

    assert (options.model, options.rows, options.peers) == ("m", ("decode", "stall"), ("llama.cpp",))
    assert (options.num_repeats, options.seed, options.ready_seconds) == (5, 9, 7.0)
    assert (options.vllm, str(options.llama), str(options.peer_root)) == (tmp_path, "l", "p")
    assert (options.json_target, options.sizes) == (str(target), QUICK)


def test_peers_can_be_left_out_or_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVGATE_BENCH_VLLM", str(tmp_path))

    assert job("--peers", "none").peers == ()
    assert job().vllm == tmp_path
    assert str(job("--vllm", "other").vllm) == "other"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rows", "decode,speed"], "--rows 'decode,speed': 'speed' is none of decode, decode-long"),
        (["--peers", "ollama"], "--peers 'ollama': 'ollama' is none of vllm, llama.cpp"),
        (["--json", "/no/such/folder/x.json"], "not a file in an existing folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(argv, words, capsys):
    with pytest.raises(CompareError, match=words):
        job(*argv)
    assert bench.run(parsed(*argv)) == bench.EXIT_BAD_OPTIONS
    assert words in capsys.readouterr().err


def test_an_unknown_peer_is_not_installed(capsys):
    assert bench.run(parsed("--install", "ollama")) == bench.EXIT_BAD_OPTIONS
    assert "is none of vllm, llama.cpp" in capsys.readouterr().err
