"""A real engine process with the scripted engine: how it starts, and every way in which it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends.protocol.messages import (
    Abort,
    Accepted,
    Done,
    Drain,
    Failed,
    Generate,
    GetStats,
    Ready,
    StartFailed,
    StatsReport,
    TextPrompt,
    TokenChunk,
)
from support.engine_child import EngineChild, engine_child
from support.gateway_process import wait_until

ENDLESS = 5000


def test_help_shows_an_example():
    answer = subprocess.run([sys.executable, "-m", "backends", "--help"], capture_output=True, text=True, check=True)

    assert "--gateway-fd" in answer.stdout
    assert "socketpair" in answer.stdout


def test_an_instance_says_what_it_serves_then_answers():
    with engine_child(served_name="mine", num_kv_blocks=10) as child:
        ready = child.read()
        assert isinstance(ready, Ready)
        assert (ready.info.served_name, ready.info.pid) == ("mine", child.process.pid)
        child.generate("r", "one two", max_tokens=3)

        assert child.read() == Accepted(request_id="r", prompt_tokens=2, max_tokens=3)
        assert "".join(child.read_until(TokenChunk).text for _ in range(3)) == "one two one "
        assert child.read_until(Done).finish_reason == "length"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_scripted_engine_loads_no_torch():
    with engine_child() as child:
        child.read_until(Ready)
        assert "torch" not in Path(f"/proc/{child.process.pid}/maps").read_text()


def test_a_start_that_fails_says_why_without_a_traceback_and_logs_it_with_one():
    with engine_child(model="scripted:start_error=no_weights_here") as child:
        failed = child.read()
        assert isinstance(failed, StartFailed)
        assert failed.message == "RuntimeError: no weights here"
        assert child.read() is None
        assert child.exit_code() == 1
        assert child.process.stderr is not None
        assert b"Traceback" in child.process.stderr.read()


@pytest.mark.parametrize(
    ("config", "named"), [({"block_sise": 3}, "block_sise"), ({"role": "both"}, "both"), ({"block_size": "x"}, "int")]
)
def test_a_configuration_that_is_not_valid_is_told(config: dict[str, object], named: str):
    with engine_child(**config) as child:
        failed = child.read()
        assert isinstance(failed, StartFailed)
        assert named in failed.message
        assert child.exit_code() == 2


def test_an_engine_that_breaks_ends_its_process_with_its_own_code():
    with engine_child(model="scripted:bug=boom") as child:
        child.read_until(Ready)
        child.generate("r", "boom")
        assert isinstance(child.read(), Accepted)
        assert child.read() is None
        assert child.exit_code() == 70


def first_refused(child: EngineChild) -> Failed:
    """Ask until a request is refused: the signal and the requests come by different ways, in no order."""
    for number in range(1000):
        name = f"new{number}"
        child.generate(name, max_tokens=1)
        while (answer := child.read()) is not None:
            if isinstance(answer, Failed):
                assert answer.request_id == name
                return answer
            if isinstance(answer, Accepted) and answer.request_id == name:
                break
    raise AssertionError("nothing was refused")


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_cleanly():
    with engine_child(model="scripted:delay=0.005") as child:
        child.read_until(Ready)
        child.generate("runs", max_tokens=200, ignore_eos=True)
        child.read_until(TokenChunk)
        child.process.send_signal(signal.SIGTERM)
        late = first_refused(child)
        done = child.read_until(Done)
        while done.request_id != "runs":
            done = child.read_until(Done)

        assert late.code == "draining"
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", 200)
        assert child.read() is None
        assert child.exit_code() == 0


def test_drain_of_an_idle_instance_exits_at_once():
    with engine_child() as child:
        child.read_until(Ready)
        child.send(Drain())
        assert child.exit_code() == 0


def test_a_second_sigterm_does_not_wait_for_requests():
    with engine_child(model="scripted:delay=0.01") as child:
        child.read_until(Ready)
        child.generate("runs", max_tokens=ENDLESS, ignore_eos=True)
        child.read_until(TokenChunk)
        child.send(Drain())
        child.generate("late")
        child.read_until(Failed)
        child.process.send_signal(signal.SIGTERM)
        assert child.exit_code() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_sigterm_while_starting_exits_at_once():
    with engine_child(model="scripted:start_delay=60") as child:
        _until_it_handles_signals(child.process)
        child.process.send_signal(signal.SIGTERM)
        assert child.exit_code() == 0


def test_ctrl_c_is_left_to_the_gateway():
    with engine_child() as child:
        child.read_until(Ready)
        child.process.send_signal(signal.SIGINT)
        child.send(GetStats(number=1))
        assert child.read_until(StatsReport).number == 1


@pytest.mark.parametrize("which", ["control", "gateway"])
def test_the_end_of_either_socket_ends_the_process_even_while_requests_run(which: str):
    with engine_child(model="scripted:delay=0.01") as child:
        child.read_until(Ready)
        child.generate("runs", max_tokens=ENDLESS, ignore_eos=True)
        child.read_until(TokenChunk)
        getattr(child, which).close()
        assert child.exit_code() == 0


def test_the_end_of_the_control_socket_ends_a_process_that_is_still_starting():
    with engine_child(model="scripted:start_delay=60") as child:
        child.control.close()
        assert child.exit_code() == 0


def test_a_gateway_that_does_not_read_does_not_hold_up_the_engine():
    """Far more is said than a socket holds; the engine finishes all the same, and all of it can be read later."""
    with engine_child(num_kv_blocks=4096, max_model_len=40000) as child:
        child.read_until(Ready)
        word = "w" * 200
        child.generate("big", word, max_tokens=20000, ignore_eos=True)
        child.send(Drain())
        done = child.read_until(Done)

        assert done.usage.completion_tokens == 20000
        assert child.exit_code() == 0


def test_an_aborted_request_says_nothing_more_and_gives_its_blocks_back():
    with engine_child(model="scripted:delay=0.002", max_num_seqs=1) as child:
        child.read_until(Ready)
        child.generate("runs", max_tokens=ENDLESS, ignore_eos=True)
        child.generate("queued", max_tokens=ENDLESS, ignore_eos=True)
        child.read_until(TokenChunk)
        child.send(Abort(request_id="queued"))
        child.send(Abort(request_id="runs"))
        child.send(Abort(request_id="unknown"))
        child.send(GetStats(number=1))
        stats = child.read_until(StatsReport).stats["merged"]

        assert (stats.num_running, stats.num_waiting, stats.num_blocks_in_use) == (0, 0, 0)
        child.generate("after", max_tokens=1)
        assert child.read_until(Done).request_id == "after"


def test_a_deadline_ends_a_request_that_waits():
    with engine_child(model="scripted:delay=0.002", max_num_seqs=1) as child:
        child.read_until(Ready)
        child.generate("runs", max_tokens=ENDLESS, ignore_eos=True)
        child.read_until(TokenChunk)
        child.send(Generate(request_id="waits", prompt=TextPrompt(text="x"), deadline_seconds=0.05))
        failed = child.read_until(Failed)

        assert (failed.request_id, failed.code) == ("waits", "timeout")


def test_a_decode_side_without_a_prefill_side_refuses_requests():
    with engine_child(role="decode") as child:
        child.read_until(Ready)
        child.generate("r")
        assert child.read_until(Failed).code == "peer_lost"


def _until_it_handles_signals(process: subprocess.Popen[bytes]) -> None:
    """Until then a SIGTERM ends it too, but by the default action."""

    def handles() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
        return bool(caught & 1 << (signal.SIGTERM - 1))

    wait_until(handles, "it handles SIGTERM", 20)
