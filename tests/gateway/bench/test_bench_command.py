"""The whole command against a scripted gateway: what is written where, and the exit code."""

from __future__ import annotations

import io
import socket

import msgspec
import pytest
from bench_fake_gateway import FakeGateway, Script, serving, whole_answer

from gateway.bench.client import find_processes, normal_url, record_timings, served_model
from gateway.bench.command import EXIT_CANNOT, EXIT_CLEAN, EXIT_FAILED_REQUESTS, EXIT_WRONG_MODE, execute
from gateway.bench.options import CompareError, CompareOptions, Job
from gateway.bench.rows import ServedModel
from support.progress_log import ProgressLog

OPTIONS = CompareOptions(num_requests=2, num_rounds=2, prompt_tokens=8, output_tokens=4)
KEY = "sk-very-secret"


async def command(gateway, **changes):
    """Exit code, stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    async with serving(gateway) as url:
        job = Job(**{"options": OPTIONS, "url": url, "key": KEY, **changes})
        code = await execute(job, ProgressLog(), stdout=stdout, stderr=stderr, clocks=gateway.clocks)
    return code, stdout.getvalue(), stderr.getvalue()


async def test_a_clean_run_prints_one_table_and_exits_0():
    code, stdout, stderr = await command(FakeGateway())

    assert (code, stderr) == (EXIT_CLEAN, "")
    assert "texts: 4 of 4 equal" in stdout
    assert KEY not in stdout


async def test_different_texts_are_reported_and_are_no_failure():
    code, stdout, _ = await command(
        FakeGateway(lambda mode, body: whole_answer(body, "ab" if mode == "split" else "aX"))
    )

    assert code == EXIT_CLEAN
    assert "texts: 0 of 4 equal; first difference in request 0 of round 1 at character 1" in stdout


async def test_json_on_stdout_takes_the_place_of_the_table_and_csv_goes_to_its_file(tmp_path):
    rows = tmp_path / "rows.csv"
    code, stdout, _ = await command(FakeGateway(), json_target="-", csv_target=str(rows))

    assert code == EXIT_CLEAN
    assert len(msgspec.json.decode(stdout)["comparison"]["passes"]) == 4
    assert len(rows.read_text().splitlines()) == 1 + 8
    assert KEY not in stdout + rows.read_text()


async def test_a_failed_mode_is_shown_and_exits_1():
    def answers(mode, body):
        return whole_answer(body) if mode == "merged" else Script(status=503, body={"error": {"message": f"no {KEY}"}})

    code, stdout, _ = await command(FakeGateway(answers))

    assert code == EXIT_FAILED_REQUESTS
    assert "FAILED: split has no figures" in stdout
    assert "HTTP 503: no ***" in stdout


async def test_a_port_where_nothing_listens_is_told_with_its_url_and_what_to_do():
    with socket.socket() as bound:  # and never listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        stderr = io.StringIO()
        job = Job(options=OPTIONS, url=url, key=KEY)
        assert await execute(job, ProgressLog(), stdout=io.StringIO(), stderr=stderr) == EXIT_CANNOT
    assert stderr.getvalue() == (
        f"kvgate compare: no gateway answers at {url}: connection refused. Start one with: kvgate serve; or give its "
        "--url\n"
    )


async def test_a_silent_fallback_exits_3_and_prints_no_table():
    code, stdout, stderr = await command(FakeGateway(lambda mode, body: Script(mode="merged")))

    assert (code, stdout) == (EXIT_WRONG_MODE, "")
    assert "asked for split" in stderr or "asked for merged" in stderr


async def test_nobody_listening_exits_2_and_says_how_to_start():
    code, _, stderr = await command(FakeGateway(), url="http://127.0.0.1:1")

    assert code == EXIT_CANNOT
    assert "kvgate serve" in stderr


async def test_something_else_than_a_gateway_exits_2():
    gateway = FakeGateway()
    gateway.refused = {"/v1/models": 500}

    code, _, stderr = await command(gateway)

    assert code == EXIT_CANNOT
    assert "/v1/models answered HTTP 500" in stderr
    assert KEY not in stderr


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", " http://h:1/v1/ "])
def test_an_address_with_or_without_v1_is_the_same(url):
    assert normal_url(url) == "http://h:1"


@pytest.mark.parametrize(
    "url",
    ["h:1", "ftp://h", "http://", "http://h/split/v1", "http://h/?key=x", "http://u:sk-very-secret@h", "http://h/#x"],
)
def test_an_address_that_would_mislead_is_refused_without_showing_a_password(url):
    with pytest.raises(CompareError, match="--url") as refused:
        normal_url(url)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "m", "modes": ["merged"], "vocab_size": 9},
        {"id": "m", "cache_modes": ["merged"], "vocab_size": 9},
        {"id": "m", "extra": {"modes": ["merged"], "vocab_size": 9}},
        {"id": "m", "kvgate": {"modes": ["merged"], "vocab_size": 9}},
    ],
)
def test_a_model_card_may_keep_its_extras_in_several_places(entry):
    assert served_model(entry) == ServedModel(id="m", modes=("merged",), vocab_size=9)


def test_processes_are_found_by_role_wherever_they_are_listed():
    by_role = {"engines": {"decode": {"info": {"num_threads": 3, "device": "cpu"}}}}
    by_list = {"instances": [{"role": "decode", "info": {"role": "decode", "num_threads": 3, "device": "cpu"}}]}
    starting = {"instances": [{"role": "prefill", "info": None}, by_list]}

    for answer in (by_role, by_list, starting):
        found = find_processes(answer)
        assert {role: process.num_threads for role, process in found.items()} == {"decode": 3}


def test_a_record_without_readable_timings_has_none():
    assert record_timings({"timings": {}}) is None
    assert record_timings({"timings": {"e2e_seconds": 1.0}}) is None  # answered elsewhere: no phases
    assert record_timings({"timings": {"queue_seconds": "soon"}}) is None
    assert record_timings([]) is None
