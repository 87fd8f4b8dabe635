"""A gateway from start to stop, against small real programs: what works, what breaks, what is never ready."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.bench import process as process_module
from gateway.bench.gateways.asking import Client, Place, set_gap
from gateway.bench.gateways.figures import ROWS
from gateway.bench.gateways.launch import GatewayLaunch
from gateway.bench.gateways.runs import GatewayBench
from gateway.bench.gateways.sizes import Kind, Sizes
from gateway.bench.gateways.upstream import Upstream, build_app
from gateway.bench.process import BenchError
from support.progress_log import ProgressLog

PASS_THROUGH = Path(__file__).with_name("bench_pass_through.py")
TINY = Sizes(
    num_chunks=4, num_warm_ups=2, num_pairs=3, num_lanes=2, num_rounds=2, num_round_requests=4, num_memory_requests=6,
    num_memory_points=3, num_streams=5, stream_gap_seconds=0.01,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """A double that refuses a request isn't about to die."""
    monkeypatch.setattr(process_module, "SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(process_module, "POLL_SECONDS", 0.02)


@asynccontextmanager
async def upstream_at(upstream):
    runner = web.AppRunner(build_app(upstream))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def measured(tmp_path, *flags, rows=ROWS, is_own=False, ready_seconds=20.0, progress=None):
    async with upstream_at(Upstream(TINY.num_chunks)) as url:
        bench = GatewayBench(
            rows=rows, sizes=TINY, seed=1, ready_seconds=ready_seconds, work=tmp_path, upstream_url=url,
            progress=progress or ProgressLog(),
        )  # fmt: skip
        command = [sys.executable, str(PASS_THROUGH), "--upstream", url, "--pid", str(tmp_path / "pid"), *flags]
        launch = GatewayLaunch("double", lambda port: [*command, "--port", str(port)], "1.0")
        return await bench.run(launch, is_own=is_own)


def is_alive(tmp_path) -> bool:
    try:
        stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_every_measure_gets_all_of_its_values(tmp_path):
    run = await measured(tmp_path)

    assert (run.failure, run.problems, run.unsupported) == ("", {}, {})
    assert {kind: len(pairs) for kind, pairs in run.pairs.items()} == {"plain": 3, "stream": 3}
    assert {kind: len(rounds) for kind, rounds in run.rounds.items()} == {"plain": 2, "stream": 2}
    assert [point.num_requests for point in run.memory] == [0, 2, 4, 6]
    assert all(point.rss_bytes >= point.pss_bytes > 0 for point in run.memory)
    assert run.burst is not None
    assert (run.burst.num_streams, run.burst.num_errors, run.burst.max_open) == (5, 0, 5)
    # warm-up 4, pairs 6, rounds 16, memory 6, streams 5
    assert run.num_requests == 37
    assert not is_alive(tmp_path)


async def test_each_value_is_of_a_first_token_before_the_end(tmp_path):
    run = await measured(tmp_path, rows=["latency"])

    for pair in [*run.pairs["plain"], *run.pairs["stream"]]:
        assert 0 < pair.direct_first <= pair.direct_whole
        assert 0 < pair.via_first <= pair.via_whole
    assert (run.rounds, run.memory, run.burst) == ({}, [], None)


async def test_progress_names_the_gateway_and_the_measure(tmp_path):
    progress = ProgressLog()
    await measured(tmp_path, rows=["latency", "streams"], progress=progress)

    assert [line[0] for line in progress.lines if isinstance(line, tuple)] == [
        "double: starting", "double: latency, plain", "double: latency, stream", "double: 5 streams at once",
    ]  # fmt: skip


async def test_a_gateway_that_is_never_ready_is_given_up_and_stopped(tmp_path):
    run = await measured(tmp_path, "--never-ready", ready_seconds=1.5)

    assert run.failure.startswith("not ready within 1.5 s")
    assert not is_alive(tmp_path)


async def test_a_gateway_that_does_not_start_is_explained_by_its_own_words(tmp_path):
    run = await measured(tmp_path, "--fails")

    assert "ended with status 1" in run.failure
    assert "no upstream for me" in run.failure


async def test_a_request_that_fails_leaves_its_measure_without_any_figure(tmp_path):
    # 4 of the warm-up, 3 plain pairs, then the second stream of the pairs.
    run = await measured(tmp_path, "--refuses-from", "9", rows=["latency"])

    assert len(run.pairs["plain"]) == 3
    assert "stream" not in run.pairs
    assert run.problems == {"latency, stream": "double, stream: HTTP 500: out of order"}


async def test_a_kind_that_never_works_is_said_and_the_other_measured(tmp_path):
    run = await measured(tmp_path, "--refuses-streams")

    assert list(run.pairs) == ["plain"]
    assert list(run.rounds) == ["plain"]
    assert run.memory == []
    assert {"warm-up, stream", "latency, stream", "requests/s, stream", "memory"} == set(run.problems)
    assert run.burst is not None
    assert (run.burst.num_errors, run.burst.first_error) == (5, "double, stream: HTTP 500: out of order")


@pytest.mark.parametrize(
    ("flag", "words"), [("--drops-word", "not the whole answer"), ("--cuts-streams", "not the whole answer")]
)
async def test_an_answer_that_is_not_whole_is_no_answer(tmp_path, flag, words):
    run = await measured(tmp_path, flag, rows=["latency", "streams"])

    assert list(run.pairs) == ["plain"]
    assert words in run.problems["latency, stream"]
    assert run.burst is not None
    assert run.burst.num_errors == 5


async def test_a_gateway_that_refuses_everything_has_no_figures_at_all(tmp_path):
    run = await measured(tmp_path, "--refuses-from", "1")

    assert run.failure == "double, plain: HTTP 500: out of order"
    assert (run.pairs, run.rounds, run.memory, run.burst) == ({}, {}, [], None)


async def test_a_gateway_that_dies_keeps_what_it_had_and_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(process_module, "SETTLE_SECONDS", 20.0)
    run = await measured(tmp_path, "--ends-at", "8")

    assert len(run.pairs["plain"]) == 3
    assert "connection" in run.problems["latency, stream"]
    assert "ended with status 3" in run.failure


async def test_the_own_gateway_tells_its_lag(tmp_path):
    run = await measured(tmp_path, "--own", is_own=True, rows=["streams"])

    assert (run.failure, run.problems, run.unsupported) == ("", {}, {})
    assert run.lag_p99_seconds == pytest.approx(0.0099)


async def test_an_own_gateway_that_does_not_record_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.bench.gateways.own.PAUSE_SECONDS", 0.0)
    run = await measured(tmp_path, is_own=True)

    assert "has no record (HTTP 404)" in run.failure


async def test_an_own_gateway_that_counts_fewer_than_it_answered_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.bench.gateways.own.PAUSE_SECONDS", 0.0)
    run = await measured(tmp_path, "--own", "--miscounts", is_own=True, rows=["latency"])

    assert run.failure == "10 requests were answered, but its metrics count 5"


async def test_the_upstream_answers_alike_in_one_piece_and_in_chunks_and_counts_what_is_open():
    async with upstream_at(Upstream(3)) as url, aiohttp.ClientSession() as session:
        client, place = Client(session, num_chunks=3), Place("direct", f"{url}/v1/chat/completions")
        for kind in Kind:
            await client.ask_and_read(place, kind)
        body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(place.url, json=body) as response:
            assert b'"completion_tokens": 3' in await response.read()

        assert await set_gap(session, url, 0.0) == 1
        with pytest.raises(BenchError, match="not the whole answer"):
            await Client(session, num_chunks=4).ask(place, Kind.PLAIN)


async def test_nobody_answering_is_an_error_of_that_place():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(BenchError, match=r"^gone, plain: no whole answer from http"):
            await Client(session, num_chunks=1).ask(Place("gone", "http://127.0.0.1:1/v1/chat/completions"), Kind.PLAIN)
