"""The life of one instance, decided without a process."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol.messages import EngineInfo
from gateway.upstreams.engine.supervisor import (
    CameUp,
    CouldNotStart,
    Effect,
    Event,
    Exited,
    Hung,
    InstanceMachine,
    InstanceState,
    LinkLost,
    Policy,
    ProbeAnswered,
    Start,
    Stop,
    StopSoon,
    Tick,
)

INFO = EngineInfo(
    role="merged",
    pid=1,
    served_name="m",
    model_path="m",
    model_fingerprint="f",
    max_model_len=100,
    vocab_size=10,
    block_size=16,
    num_blocks=8,
    kv_cache_dtype="fp32",
    kv_bytes_per_token=4,
    weight_dtype="fp32",
    device="cpu",
    num_threads=1,
)
POLICY = Policy(ready_timeout_seconds=100.0, max_restarts=3)


def started(now: float = 0.0) -> InstanceMachine:
    machine = InstanceMachine(POLICY)
    assert machine.handle(Start(), now) == [Effect.SPAWN]
    return machine


def ready(now: float = 0.0) -> InstanceMachine:
    machine = started(now)
    assert machine.handle(CameUp(INFO), now) == []
    return machine


def crash(machine: InstanceMachine, now: float) -> None:
    machine.handle(LinkLost(), now)
    machine.handle(Exited("the process was killed by SIGKILL"), now)


def tick(machine: InstanceMachine) -> tuple[float, list[Effect]]:
    """Let the time of its deadline come."""
    assert machine.deadline is not None
    now = machine.deadline
    return now, machine.handle(Tick(), now)


def test_an_instance_that_comes_up_is_ready():
    machine = ready()

    assert (machine.state, machine.reason, machine.info) == (InstanceState.READY, "", INFO)


def test_one_that_others_call_hung_is_killed_at_once_and_started_again_with_their_reason():
    machine = ready()

    assert machine.handle(Hung("it is hung, says decode-0"), 10.0) == [Effect.KILL]
    assert (machine.state, machine.reason) == (InstanceState.RESTARTING, "it is hung, says decode-0")
    crash(machine, 10.1)
    assert machine.reason == "it is hung, says decode-0"
    assert tick(machine)[1] == [Effect.SPAWN]


def test_one_that_is_not_up_or_is_killed_already_is_not_killed_for_being_hung():
    starting, dying = started(), ready()
    dying.handle(LinkLost(), 1.0)

    assert starting.handle(Hung("x"), 1.0) == dying.handle(Hung("x"), 1.0) == []
    assert starting.state is InstanceState.STARTING


def test_one_that_hangs_while_it_drains_is_killed_and_stays_ended():
    machine = ready()
    machine.handle(Stop(5.0), 1.0)
    assert machine.handle(Hung("x"), 2.0) == [Effect.KILL]
    crash(machine, 2.1)
    assert machine.state is InstanceState.STOPPED

    told = ready()
    told.handle(StopSoon(), 1.0)
    assert told.handle(Hung("x"), 2.0) == [Effect.KILL]
    crash(told, 2.1)
    assert told.state is InstanceState.STOPPED


def test_an_instance_that_dies_is_started_again_soon_and_says_why():
    machine = ready()
    crash(machine, 10.0)

    assert (machine.state, machine.reason) == (InstanceState.RESTARTING, "the process was killed by SIGKILL")
    assert tick(machine) == (10.2, [Effect.SPAWN])
    assert machine.num_restarts == 1
    machine.handle(CameUp(INFO), 11.0)
    assert machine.state is InstanceState.READY


def test_an_instance_is_not_ready_from_the_moment_its_connection_ends():
    machine = ready()
    machine.handle(LinkLost(), 1.0)

    assert (machine.state, machine.info) == (InstanceState.RESTARTING, None)


def test_a_process_without_a_connection_that_stays_is_killed():
    machine = ready()
    machine.handle(LinkLost(), 1.0)

    assert tick(machine) == (1.0 + POLICY.exit_seconds, [Effect.KILL])


def test_each_restart_within_a_minute_waits_twice_as_long_until_it_is_given_up():
    machine, now, waits = ready(), 10.0, []
    for _ in range(POLICY.max_restarts):
        crash(machine, now)
        at, _ = tick(machine)
        waits.append(round(at - now, 3))
        now = at
        machine.handle(CameUp(INFO), now)
    crash(machine, now)

    assert waits == [0.2, 0.4, 0.8]
    assert (machine.state, machine.reason) == (InstanceState.FAILED, "the process was killed by SIGKILL")
    assert machine.deadline is None


def test_restarts_of_long_ago_are_forgiven():
    machine, now = ready(), 0.0
    for _ in range(10):
        now += 70.0
        crash(machine, now)
        assert tick(machine) == (now + 0.2, [Effect.SPAWN])
        machine.handle(CameUp(INFO), now)

    assert machine.state is InstanceState.READY


def test_an_instance_that_says_it_can_not_serve_is_not_tried_again():
    machine = started()
    machine.handle(CouldNotStart("model 'x' is not here: run kvgate model pull"), 1.0)
    machine.handle(LinkLost(), 1.0)
    machine.handle(Exited("the process exited with code 1"), 1.1)

    assert (machine.state, machine.reason) == (InstanceState.FAILED, "model 'x' is not here: run kvgate model pull")


def test_one_that_has_served_before_may_fail_to_start_for_a_while():
    machine = ready()
    crash(machine, 1.0)
    tick(machine)
    machine.handle(CouldNotStart("the device's memory is still taken"), 2.0)
    machine.handle(Exited("the process exited with code 1"), 2.0)

    assert (machine.state, machine.reason) == (InstanceState.RESTARTING, "the device's memory is still taken")


def test_a_process_that_can_not_be_made_at_all_is_a_failure():
    machine = started()
    machine.handle(CouldNotStart("no process could be started", has_process=False), 1.0)

    assert machine.state is InstanceState.FAILED


def test_an_instance_that_is_not_ready_in_time_is_killed_and_that_is_the_reason():
    machine = started()
    assert tick(machine) == (100.0, [Effect.KILL])
    machine.handle(Exited("the process was killed by SIGKILL"), 100.1)

    assert (machine.state, machine.reason) == (InstanceState.RESTARTING, "it was not ready within 100 s")


def test_a_live_instance_is_probed_again_and_again():
    machine, now = ready(), 0.0
    for _ in range(3):
        now, effects = tick(machine)
        assert effects == [Effect.PROBE]
        machine.handle(ProbeAnswered(), now + 1.0)

    assert now == 2.0 + 3.0 + 3.0
    assert machine.state is InstanceState.READY


def test_an_instance_that_does_not_answer_is_killed_and_started_again():
    machine = ready()
    asked, _ = tick(machine)
    assert tick(machine) == (asked + POLICY.probe_deadline_seconds, [Effect.KILL])
    assert machine.state is InstanceState.RESTARTING
    machine.handle(LinkLost(), 33.0)
    machine.handle(Exited("the process was killed by SIGKILL"), 33.0)

    assert machine.reason == "it did not answer for 30 s"
    assert tick(machine)[1] == [Effect.SPAWN]


def test_a_late_answer_does_not_save_an_instance_that_is_being_killed():
    machine = ready()
    tick(machine)
    tick(machine)
    machine.handle(ProbeAnswered(), 40.0)

    assert machine.state is InstanceState.RESTARTING


def test_stopping_drains_then_terminates_then_kills():
    machine = ready()
    assert machine.handle(Stop(10.0), 5.0) == [Effect.DRAIN]
    assert machine.state is InstanceState.DRAINING
    assert tick(machine) == (15.0, [Effect.TERMINATE])
    assert tick(machine) == (15.0 + POLICY.exit_seconds, [Effect.KILL])
    machine.handle(LinkLost(), 18.0)
    machine.handle(Exited("the process was killed by SIGKILL"), 18.0)

    assert machine.state is InstanceState.STOPPED


def test_a_drained_instance_is_stopped_and_not_started_again():
    machine = ready()
    machine.handle(Stop(10.0), 5.0)
    machine.handle(LinkLost(), 6.0)
    machine.handle(Exited("the process exited with code 0"), 6.0)

    assert (machine.state, machine.deadline) == (InstanceState.STOPPED, None)


def test_stopping_one_that_is_starting_terminates_it_at_once():
    assert started().handle(Stop(10.0), 5.0) == [Effect.TERMINATE]


def test_stopping_one_that_has_no_process_is_done_at_once():
    waiting = ready()
    crash(waiting, 1.0)
    waiting.handle(Stop(10.0), 1.1)
    given_up = started()
    given_up.handle(CouldNotStart("no", has_process=False), 1.0)
    given_up.handle(Stop(10.0), 1.1)

    assert (waiting.state, given_up.state) == (InstanceState.STOPPED, InstanceState.STOPPED)


def test_an_end_that_comes_before_an_announced_stop_is_no_failure():
    machine = ready()
    machine.handle(StopSoon("idle"), 1.0)
    assert machine.state is InstanceState.READY
    machine.handle(LinkLost(), 2.0)
    assert (machine.state, machine.reason) == (InstanceState.DRAINING, "idle")
    machine.handle(Exited("the process exited with code 0"), 2.0)

    assert (machine.state, machine.deadline) == (InstanceState.STOPPED, None)


def test_a_process_that_lost_its_connection_before_an_announced_stop_is_still_killed_in_time():
    machine = ready()
    machine.handle(StopSoon(), 1.0)
    machine.handle(LinkLost(), 2.0)

    assert machine.handle(Stop(10.0), 3.0) == []
    assert tick(machine) == (2.0 + POLICY.exit_seconds, [Effect.KILL])


EVENTS: st.SearchStrategy[Event] = st.sampled_from(
    [CameUp(INFO), CouldNotStart("no"), LinkLost(), Exited("gone"), ProbeAnswered(), StopSoon(), Tick()]
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(events=st.lists(st.tuples(EVENTS, st.floats(0.0, 50.0)), max_size=40))
def test_whatever_happens_a_stop_ends_it_within_its_time(events: list[tuple[Event, float]]):
    """The edge reports an exit only of a process that runs, and nothing of a process after its exit."""
    machine, now, alive = started(), 0.0, True
    for event, wait in events:
        now += wait
        if not alive and not isinstance(event, Tick):
            continue
        alive = alive and not isinstance(event, Exited)
        alive |= Effect.SPAWN in machine.handle(event, now)
        assert (machine.state is InstanceState.READY) == (machine.info is not None)
        assert not alive or machine.deadline is not None or machine.state is not InstanceState.READY
    stopped_at = now
    effects = machine.handle(Stop(10.0), now)
    while machine.state is not InstanceState.STOPPED:
        if Effect.KILL in effects or machine.deadline is None:
            machine.handle(Exited("killed"), now)
            break
        now, effects = tick(machine)

    assert machine.state is InstanceState.STOPPED
    assert now <= stopped_at + 10.0 + 2 * POLICY.exit_seconds
