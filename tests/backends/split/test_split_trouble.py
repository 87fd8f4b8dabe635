"""Aborts, deaths, time that is up and steps that fail, in every state: who is told, and that nothing stays held."""

import threading
from collections.abc import Callable

import pytest
from scripted_kv import prompt, reference
from split_doubles import WAIT_SECONDS, SplitPair

from backends.core.errors import RequestRefused
from backends.core.scheduler_types import SchedulerOutput
from backends.engines.base import PeerId
from backends.engines.split.handoff import Phase
from backends.protocol.messages import (
    CancelPrefill,
    Prefilled,
    TransferMode,
)


class Gate:
    """Copies stop here until it is opened."""

    def __init__(self, pair: SplitPair) -> None:
        self._pair = pair
        self.reached = threading.Event()
        self._open = threading.Event()
        pair.before_copy = self._pass

    def _pass(self) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_SECONDS)

    def open(self) -> None:
        self._open.set()


STATES = ["waiting", "sent", "queued on prefill", "between chunks", "copying", "answered", "decoding"]


def bring_to(state: str) -> tuple[SplitPair, Gate | None]:
    """A pair whose request "a" is in `state`."""
    pair = SplitPair(decode_seqs=1 if state == "waiting" else 8, chunk=4, transfer_mode="request")
    gate = Gate(pair) if state == "copying" else None
    pair.connect()
    if state == "waiting":
        pair.submit("z", prompt(6), 4)
    pair.submit("a", prompt(11), 8)
    if state in STATES[2:]:
        pair.deliver()
    if state == "between chunks":
        assert pair.prefill.step()
    if gate is not None:
        while not gate.reached.is_set():
            pair.prefill.step()
    if state in ("answered", "decoding"):
        while not any(isinstance(message, Prefilled) for message in pair.from_prefill):
            pair.prefill.step()
    if state == "decoding":
        pair.deliver()
        pair.decode.step()
    expected = {"waiting": Phase.WAITING, "decoding": Phase.DECODING}.get(state, Phase.PREFILLING)
    assert pair.decode._handoff.phase("a") is expected
    return pair, gate


def open_soon(gate: Gate | None) -> None:
    if gate is not None:
        gate.open()


def assert_serves_another(pair: SplitPair) -> None:
    """Whatever happened to the request before it; and then the pair is done with."""
    pair.submit("b", prompt(9), 3)
    pair.run()
    assert pair.tokens("b") == reference(prompt(9), 3, ignore_eos=True)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", STATES)
def test_pd_04_an_abort_leaves_nothing_behind(state: str):
    pair, gate = bring_to(state)
    told = len(pair.emitted)

    pair.decode.abort("a")
    pair.decode.abort("a")  # and once more does nothing
    cancelling = pair.decode._handoff.phase("a") is Phase.CANCELLING
    assert cancelling is (state not in ("waiting", "decoding"))  # the prefill side may still write to its blocks
    open_soon(gate)
    pair.run()

    assert [event for event in pair.emitted[told:] if getattr(event, "request_id", "") == "a"] == []
    pair.assert_idle()
    assert_serves_another(pair)


@pytest.mark.parametrize("state", STATES)
def test_pd_04_the_death_of_the_prefill_side_fails_what_needs_it(state: str):
    pair, gate = bring_to(state)

    open_soon(gate)
    pair.kill_prefill()
    pair.run()

    if state == "decoding":
        assert pair.tokens("a") == reference(prompt(11), 8, ignore_eos=True)
    else:
        failed = pair.failed("a")
        assert failed.code == "peer_lost"
        assert "killed by signal 9" in failed.message
        assert "is being restarted" in failed.message
    pair.assert_idle()
    with pytest.raises(RequestRefused, match="restarted") as refused:
        pair.submit("b", prompt(9), 3)
    assert refused.value.code == "peer_lost"

    pair.connect()
    assert_serves_another(pair)


@pytest.mark.parametrize("state", STATES)
def test_pd_04_the_death_of_the_decode_side_leaves_the_prefill_side_clean(state: str):
    pair, gate = bring_to(state)

    open_soon(gate)
    pair.kill_decode()

    assert pair.prefill.num_unfinished() == 0
    assert pair.prefill.stats().num_blocks_in_use == 0
    pair.prefill_scheduler.check_integrity()
    assert not pair.prefill.step()
    pair.prefill.peer_message(PeerId("another", 99), CancelPrefill(request_id="a"))  # too late to matter
    pair.close()


@pytest.mark.parametrize("state", STATES[:-1])
def test_the_handoff_timeout_fails_a_request_before_its_first_token(state: str):
    pair, gate = bring_to(state)

    assert pair.decode.next_deadline() is not None
    pair.now += 101.0
    pair.decode.step()
    open_soon(gate)
    pair.run()

    failed = pair.failed("a")
    assert failed.code == "timeout"
    assert "handoff_timeout_seconds = 100" in failed.message
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", STATES)
def test_a_requests_own_deadline_counts_in_every_state(state: str):
    pair, gate = bring_to(state)
    pair.decode.abort("a")
    open_soon(gate)
    pair.run()
    pair.submit("b", prompt(9), 8, deadline_seconds=5.0)
    if state == "decoding":
        pair.run_until(lambda: pair.decode._handoff.phase("b") is Phase.DECODING)

    pair.now += 6.0
    pair.decode.step()
    pair.run()

    assert pair.failed("b").code == "timeout"
    pair.assert_idle()
    pair.close()


def test_pd_01_a_step_that_fails_on_the_prefill_side_costs_its_requests_alone(pair: SplitPair):
    pair.prefill_runner.fail_next = RuntimeError("out of memory")
    pair.submit("a", prompt(9), 4)
    pair.run()
    pair.submit("b", prompt(9), 4)
    pair.run()

    assert pair.failed("a").code == "internal"
    assert "out of memory" in pair.failed("a").message
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()


def test_blocks_are_not_reused_while_a_copy_out_of_them_runs():
    pair = SplitPair(chunk=4, max_in_flight=4)
    gate = Gate(pair)
    pair.connect()
    pair.submit("a", prompt(9), 4)
    pair.deliver()
    assert pair.prefill.step()  # three layers of the first chunk wait at the gate
    assert gate.reached.wait(WAIT_SECONDS)
    request = next(pair.prefill_scheduler.requests())

    preempted = SchedulerOutput((), preempted=(request,))
    assert_waits_for(gate, lambda: pair.prefill._before_compute(preempted))
    pair.run()
    assert pair.tokens("a") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()
    pair.close()


def test_a_failed_step_is_answered_only_after_its_copies_have_ended():
    pair = SplitPair(max_in_flight=1)
    gate = Gate(pair)
    pair.connect()
    pair.prefill_runner.fail_next = RuntimeError("out of memory")
    pair.prefill_runner.before_layer = lambda layer: layer == 0 or gate.reached.wait(WAIT_SECONDS)  # layer 0 is copied
    pair.submit("a", prompt(9), 4)
    pair.deliver()

    assert_waits_for(gate, pair.prefill.step)
    pair.run()
    assert pair.failed("a").code == "internal"
    pair.assert_idle()
    pair.close()


def assert_waits_for(gate: Gate, call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert gate.reached.wait(WAIT_SECONDS)
    thread.join(0.05)
    assert thread.is_alive()
    gate.open()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_step_that_fails_on_the_decode_side_costs_its_requests_alone(pair: SplitPair):
    pair.submit("a", prompt(9), 4)
    pair.run_until(lambda: bool(pair.tokens("a")))
    pair.decode_runner.fail_next = RuntimeError("out of memory")
    pair.run()
    pair.submit("b", prompt(9), 4)
    pair.run()

    assert pair.failed("a").code == "internal"
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()


def test_a_copy_that_fails_fails_its_request_by_name(mode: TransferMode):
    pair = SplitPair(transfer_mode=mode, chunk=4)
    pair.connect()

    def break_down() -> None:
        raise OSError("the memory is gone")

    pair.before_copy = break_down
    pair.submit("a", prompt(9), 4)
    pair.run()
    assert pair.failed("a").code == "transfer_failed"
    assert "the memory is gone" in pair.failed("a").message
    pair.before_copy = lambda: None
    pair.submit("b", prompt(9), 4)
    pair.run()
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()
    pair.close()
