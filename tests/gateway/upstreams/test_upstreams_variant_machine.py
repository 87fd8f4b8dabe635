"""When engine variants start and stop, decided without a process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.types import CacheMode
from gateway.upstreams.engine.variant_events import (
    Ask,
    Broke,
    CameUp,
    Effect,
    Event,
    Grant,
    Leave,
    Refuse,
    Shutdown,
    StartVariant,
    Stopped,
    StopVariant,
    Tick,
    VariantKey,
)
from gateway.upstreams.engine.variant_machine import SHUTTING_DOWN, VariantMachine, VariantPolicy, VariantState

INT8 = VariantKey(CacheMode.MERGED, "int8")
FP16 = VariantKey(CacheMode.MERGED, "fp16")
SPLIT = VariantKey(CacheMode.SPLIT, "int8")
KEYS = (INT8, FP16, SPLIT)


def make_machine(max_variants: int = 1) -> VariantMachine:
    policy = VariantPolicy(max_variants, idle_seconds=60.0, ready_timeout_seconds=30.0, first_back_off_seconds=5.0)
    return VariantMachine(KEYS, policy)


def running(machine: VariantMachine, key: VariantKey, waiter: int, now: float = 0.0) -> None:
    machine.handle(Ask(waiter, key), now)
    assert machine.handle(CameUp(key), now) == [Grant(waiter, key)]


def state(machine: VariantMachine, key: VariantKey) -> VariantState:
    return next(snapshot.state for snapshot in machine.snapshots() if snapshot.key == key)


def test_the_first_who_asks_starts_it_and_all_share_the_start():
    machine = make_machine()

    assert machine.handle(Ask(1, INT8), 0.0) == [StartVariant(INT8)]
    assert machine.handle(Ask(2, INT8), 1.0) == []
    assert machine.handle(CameUp(INT8), 2.0) == [Grant(1, INT8), Grant(2, INT8)]
    assert machine.handle(Ask(3, INT8), 3.0) == [Grant(3, INT8)]


def test_it_is_stopped_once_nobody_has_used_it_for_the_idle_time():
    machine = make_machine()
    running(machine, INT8, 1)
    assert machine.deadline() is None
    machine.handle(Leave(1), 100.0)

    assert machine.deadline() == 160.0
    assert machine.handle(Tick(), 159.0) == []
    assert machine.handle(Tick(), 160.0) == [StopVariant(INT8, "no request for 60 s")]
    assert machine.handle(Stopped(INT8), 161.0) == []
    assert (state(machine, INT8), machine.deadline()) == (VariantState.STOPPED, None)


def test_a_client_that_leaves_while_it_starts_does_not_stop_the_start_but_it_comes_up_idle():
    machine = make_machine()
    machine.handle(Ask(1, INT8), 0.0)
    assert machine.handle(Leave(1), 1.0) == []

    assert machine.handle(CameUp(INT8), 5.0) == []
    assert machine.deadline() == 65.0
    assert machine.handle(Ask(2, INT8), 6.0) == [Grant(2, INT8)]


def test_the_one_that_was_idle_for_longest_makes_room_and_the_new_one_starts_when_it_is_gone():
    machine = make_machine(max_variants=2)
    for waiter, key in enumerate((FP16, INT8)):
        running(machine, key, waiter)
    machine.handle(Leave(1), 5.0)
    machine.handle(Leave(0), 6.0)

    assert machine.handle(Ask(7, SPLIT), 7.0) == [StopVariant(INT8, "making room for split[int8]")]
    assert machine.handle(Stopped(INT8), 8.0) == [StartVariant(SPLIT)]
    assert machine.handle(CameUp(SPLIT), 9.0) == [Grant(7, SPLIT)]


def test_if_none_is_idle_who_asks_for_another_is_told_to_come_back():
    machine = make_machine()
    running(machine, INT8, 1)
    (refusal,) = machine.handle(Ask(2, FP16), 1.0)

    assert isinstance(refusal, Refuse)
    assert (refusal.busy, refusal.retry_after_seconds) == (True, 5.0)
    assert "max_variants" in refusal.reason
    assert "merged[int8]" in refusal.reason


def test_a_promised_place_is_not_given_to_another():
    machine = make_machine()
    running(machine, INT8, 1)
    machine.handle(Leave(1), 1.0)
    machine.handle(Ask(2, FP16), 2.0)

    assert isinstance(machine.handle(Ask(3, SPLIT), 3.0)[0], Refuse)
    assert isinstance(machine.handle(Ask(4, INT8), 3.0)[0], Refuse)
    assert machine.handle(Ask(5, FP16), 3.0) == []
    assert machine.handle(Stopped(INT8), 4.0) == [StartVariant(FP16)]


def test_one_that_is_stopping_is_started_again_for_who_asks_meanwhile():
    machine = make_machine()
    running(machine, INT8, 1)
    machine.handle(Leave(1), 0.0)
    machine.handle(Tick(), 60.0)

    assert machine.handle(Ask(2, INT8), 61.0) == []
    assert machine.handle(Stopped(INT8), 62.0) == [StartVariant(INT8)]


def test_a_start_that_fails_is_told_to_all_who_wait_and_is_tried_again_after_longer_and_longer_times():
    machine, now, waits = make_machine(), 0.0, []
    for attempt in range(3):
        machine.handle(Ask(2 * attempt, INT8), now)
        machine.handle(Ask(2 * attempt + 1, INT8), now)
        first, second, stop = machine.handle(Broke(INT8, "no weights"), now)
        assert isinstance(first, Refuse)
        assert isinstance(second, Refuse)
        assert (first.waiter, second.waiter, first.reason) == (2 * attempt, 2 * attempt + 1, "no weights")
        assert stop == StopVariant(INT8, "no weights")
        machine.handle(Stopped(INT8), now)
        (refusal,) = machine.handle(Ask(99, INT8), now)
        assert isinstance(refusal, Refuse)
        assert refusal.retry_after_seconds is not None
        assert "no weights" in refusal.reason
        waits.append(refusal.retry_after_seconds)
        now += refusal.retry_after_seconds

    assert waits == [5.0, 10.0, 20.0]
    assert machine.handle(Ask(100, INT8), now) == [StartVariant(INT8)]
    machine.handle(CameUp(INT8), now)
    assert machine.snapshots()[0].reason == ""


def test_a_start_that_takes_too_long_is_a_failure():
    machine = make_machine()
    machine.handle(Ask(1, INT8), 0.0)
    assert machine.deadline() == 30.0
    refusal, stop = machine.handle(Tick(), 30.0)

    assert isinstance(refusal, Refuse)
    assert refusal.reason == "it was not ready within 30 s"
    assert stop == StopVariant(INT8, "it was not ready within 30 s")


def test_one_that_breaks_is_stopped_only_when_its_last_request_is_over():
    machine = make_machine()
    running(machine, INT8, 1)
    assert machine.handle(Broke(INT8, "prefill is failed"), 1.0) == []
    assert isinstance(machine.handle(Ask(2, INT8), 2.0)[0], Refuse)

    assert machine.handle(Leave(1), 3.0) == [StopVariant(INT8, "prefill is failed")]


def test_a_shutdown_stops_everything_and_answers_everyone():
    machine = make_machine(max_variants=2)
    running(machine, INT8, 1)
    machine.handle(Ask(2, FP16), 1.0)

    assert machine.handle(Shutdown(), 2.0) == [
        Refuse(2, SHUTTING_DOWN),
        StopVariant(INT8, SHUTTING_DOWN),
        StopVariant(FP16, SHUTTING_DOWN),
    ]
    assert machine.handle(Ask(3, INT8), 3.0) == [Refuse(3, SHUTTING_DOWN)]
    assert machine.handle(CameUp(FP16), 3.0) == []


# ------------------------------------------------------------------------------------------------- any order of events


@dataclass
class World:
    """Processes and clients around a machine: notes what it does, and fails when it does what it never may."""

    machine: VariantMachine
    now: float = 0.0
    starting: set[VariantKey] = field(default_factory=set)
    ready: set[VariantKey] = field(default_factory=set)
    stopping: set[VariantKey] = field(default_factory=set)
    unanswered: dict[int, VariantKey] = field(default_factory=dict)
    granted: dict[int, VariantKey] = field(default_factory=dict)
    num_asked: int = 0
    closed: bool = False

    def send(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.now):
            self._apply(effect)
        alive, limit = self.starting | self.ready | self.stopping, self.machine.policy.max_variants
        promised = set(self.unanswered.values()) - self.starting
        assert len(alive) <= limit
        assert len(self.starting | self.ready | promised) <= limit, "a place was promised that does not come"
        assert len(alive) == limit or promised <= alive, "a place is free, and who waits for it doesn't get it"

    def _apply(self, effect: Effect) -> None:
        match effect:
            case StartVariant(key=key):
                assert key not in self.starting | self.ready | self.stopping, "two starts at once"
                assert not self.closed
                self.starting.add(key)
            case StopVariant(key=key):
                assert key in self.starting | self.ready, "stopped what does not run"
                assert self.closed or key not in self.granted.values(), "stopped one with requests"
                self.starting.discard(key)
                self.ready.discard(key)
                self.stopping.add(key)
            case Grant(waiter=waiter, key=key):
                assert self.unanswered.pop(waiter) == key
                assert key in self.ready
                self.granted[waiter] = key
            case Refuse(waiter=waiter):
                self.unanswered.pop(waiter)

    def ask(self, key: VariantKey) -> None:
        self.num_asked += 1
        self.unanswered[self.num_asked] = key
        self.send(Ask(self.num_asked, key))

    def leave(self, index: int) -> None:
        present = [*self.unanswered, *self.granted]
        if present:
            waiter = present[index % len(present)]
            self.unanswered.pop(waiter, None)
            self.granted.pop(waiter, None)
            self.send(Leave(waiter))

    def come_up(self, key: VariantKey) -> None:
        if key in self.starting:
            self.starting.discard(key)
            self.ready.add(key)
            self.send(CameUp(key))

    def end(self, key: VariantKey) -> None:
        if key in self.stopping:
            self.stopping.discard(key)
            self.send(Stopped(key))

    def shut_down(self) -> None:
        self.closed = True
        self.send(Shutdown())

    def act(self, action: str, key: VariantKey, number: int) -> None:
        self.now += number
        match action:
            case "ask":
                self.ask(key)
            case "leave":
                self.leave(number)
            case "come_up":
                self.come_up(key)
            case "break":
                self.send(Broke(key, "broken"))  # also of one that has ended: a late word of its watcher
            case "end":
                self.end(key)
            case "tick":
                self.send(Tick())
            case "shut_down":
                self.shut_down()


ACTIONS = st.tuples(
    st.sampled_from(["ask", "ask", "ask", "leave", "leave", "come_up", "come_up", "break", "end", "end", "tick"]),
    st.sampled_from(KEYS),
    st.integers(0, 40),
)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=60),
    max_variants=st.integers(1, 3),
    shut_down_at=st.none() | st.integers(0, 60),
)
def test_in_any_order_of_events_no_rule_is_broken_and_everyone_gets_an_answer(
    actions: list[tuple[str, VariantKey, int]], max_variants: int, shut_down_at: int | None
):
    world = World(make_machine(max_variants))
    for i, (action, key, number) in enumerate(actions):
        if i == shut_down_at:
            world.shut_down()
        world.act(action, key, number)

    while world.unanswered:  # nothing more happens but time
        deadline = world.machine.deadline()
        assert deadline is not None
        world.now = max(world.now, deadline)
        world.send(Tick())
        for key in list(world.stopping):
            world.end(key)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), max_variants=st.integers(1, 3))
def test_after_any_events_a_world_without_requests_ends_without_processes(
    actions: list[tuple[str, VariantKey, int]], max_variants: int
):
    world = World(make_machine(max_variants))
    for action, key, number in actions:
        world.act(action, key, number)
    while world.unanswered or world.granted:
        world.leave(0)
    for _ in range(10):
        for key in KEYS:
            world.come_up(key)
            world.end(key)
        world.now += 60.0
        world.send(Tick())

    assert not world.starting | world.ready | world.stopping
    assert world.machine.deadline() is None


@pytest.mark.parametrize("key", KEYS)
def test_a_variant_is_written_with_its_mode_and_dtype(key: VariantKey):
    assert str(key) == f"{key.mode.value}[{key.kv_cache_dtype}]"
