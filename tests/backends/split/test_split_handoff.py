"""The handoff state machine: each transition as a fact, then random event orders against a model of both sides."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engines.split.events import (
    Aborted,
    BlocksReserved,
    DecodeFinished,
    Effect,
    Event,
    FailRequest,
    FreeBlocks,
    PeerConnected,
    PeerLost,
    PrefillDone,
    PrefillFailure,
    PrefillReleased,
    SendCancel,
    SendPrefill,
    StartDecode,
    StopDecode,
    Submitted,
    TimePassed,
)
from backends.engines.split.handoff import Handoff, Phase

BLOCKS = (4, 7)


def make_handoff(*, max_active: int = 4, timeout_seconds: float = 10.0, connected: bool = True) -> Handoff:
    handoff = Handoff(max_active=max_active, timeout_seconds=timeout_seconds)
    if connected:
        handoff.handle(PeerConnected())
    return handoff


def handoff_in(phase: Phase | None) -> Handoff:
    """A handoff whose only request, "a", arrived at 0 and is in `phase`."""
    handoff = make_handoff()
    if phase is None:
        return handoff
    handoff.handle(Submitted("a", at=0.0))
    if phase is not Phase.WAITING:
        handoff.handle(BlocksReserved("a", BLOCKS))
    if phase is Phase.DECODING:
        handoff.handle(PrefillDone("a"))
    if phase is Phase.CANCELLING:
        handoff.handle(Aborted("a"))
    assert handoff.phase("a") is phase
    return handoff


FREE = FreeBlocks("a", BLOCKS)
START = StartDecode("a", BLOCKS)
STEPS: list[tuple[Phase | None, Event, list[Effect], Phase | None]] = [
    (Phase.WAITING, BlocksReserved("a", BLOCKS), [SendPrefill("a", BLOCKS)], Phase.PREFILLING),
    (Phase.WAITING, Aborted("a"), [], None),
    (Phase.WAITING, PrefillDone("a"), [], Phase.WAITING),
    (Phase.WAITING, PrefillReleased("a"), [], Phase.WAITING),
    (Phase.PREFILLING, PrefillDone("a"), [START], Phase.DECODING),
    (Phase.PREFILLING, Aborted("a"), [SendCancel("a")], Phase.CANCELLING),
    (
        Phase.PREFILLING,
        PrefillFailure("a", "queue_full", "no room"),
        [FREE, FailRequest("a", "queue_full", "no room")],
        None,
    ),
    (Phase.CANCELLING, PrefillDone("a"), [FREE], None),
    (Phase.CANCELLING, PrefillFailure("a", "internal", "x"), [FREE], None),
    (Phase.CANCELLING, PrefillReleased("a"), [FREE], None),
    (Phase.CANCELLING, Aborted("a"), [], Phase.CANCELLING),
    (Phase.CANCELLING, PeerLost("killed"), [FREE], None),
    (Phase.CANCELLING, TimePassed(1e9), [], Phase.CANCELLING),
    (Phase.DECODING, Aborted("a"), [StopDecode("a")], None),
    (Phase.DECODING, DecodeFinished("a"), [], None),
    (Phase.DECODING, PeerLost("killed"), [], Phase.DECODING),
    (Phase.DECODING, TimePassed(1e9), [], Phase.DECODING),  # its own deadline is an abort to this machine
    (Phase.DECODING, PrefillDone("a"), [], Phase.DECODING),
    (Phase.DECODING, PrefillReleased("a"), [], Phase.DECODING),
    (None, BlocksReserved("a", BLOCKS), [], None),
    (None, PrefillDone("a"), [], None),
    (None, Aborted("a"), [], None),
]


@pytest.mark.parametrize(("phase", "event", "effects", "after"), STEPS)
def test_each_event_in_each_phase(phase: Phase | None, event: Event, effects: list[Effect], after: Phase | None):
    handoff = handoff_in(phase)

    assert list(handoff.handle(event)) == effects
    assert handoff.phase("a") is after


def failures(effects: list[Effect]) -> list[FailRequest]:
    return [effect for effect in effects if isinstance(effect, FailRequest)]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING])
def test_a_lost_peer_fails_what_needs_it(phase: Phase):
    handoff = handoff_in(phase)

    effects = list(handoff.handle(PeerLost("killed by signal 9")))

    (failure,) = failures(effects)
    assert failure.code == "peer_lost"
    assert "killed by signal 9" in failure.message
    assert (FREE in effects) is (phase is Phase.PREFILLING)
    assert handoff.phase("a") is None


@pytest.mark.parametrize(
    ("phase", "beside", "after"),
    [(Phase.WAITING, [], None), (Phase.PREFILLING, [SendCancel("a")], Phase.CANCELLING)],
)
def test_the_handoff_timeout_ends_the_wait(phase: Phase, beside: list[Effect], after: Phase | None):
    handoff = handoff_in(phase)

    assert handoff.next_deadline() == 10.0
    assert list(handoff.handle(TimePassed(9.9))) == []
    effects = list(handoff.handle(TimePassed(10.0)))

    (failure,) = failures(effects)
    assert failure.code == "timeout"
    assert "handoff_timeout_seconds = 10" in failure.message
    assert [effect for effect in effects if effect is not failure] == beside
    assert handoff.phase("a") is after
    assert handoff.next_deadline() is None


def test_a_request_is_refused_while_no_peer_is_there():
    handoff = make_handoff(connected=False)

    (failure,) = handoff.handle(Submitted("a", at=0.0))

    assert isinstance(failure, FailRequest)
    assert failure.code == "peer_lost"
    assert handoff.phase("a") is None


def test_requests_start_in_order_of_arrival_and_no_more_than_max_active():
    handoff = make_handoff(max_active=1)
    for request_id in "abc":
        handoff.handle(Submitted(request_id, at=0.0))

    assert handoff.next_waiting() == "a"
    handoff.handle(BlocksReserved("a", BLOCKS))
    assert handoff.next_waiting() is None
    handoff.handle(Aborted("a"))  # its blocks are still held, its place is not
    assert handoff.next_waiting() == "b"
    assert handoff.held_blocks() == list(BLOCKS)


# ---------------------------------------------------------------------------------------------- random event orders

NUM_BLOCKS = 6


@dataclass
class World:
    """Both sides as the machine's effects would drive them; every rule is an assertion in `apply`."""

    handoff: Handoff = field(default_factory=lambda: Handoff(max_active=3, timeout_seconds=10.0))
    now: float = 0.0
    free: set[int] = field(default_factory=lambda: set(range(NUM_BLOCKS)))
    alive: bool = False
    at_prefill: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the peer may write to these
    decoding: dict[str, tuple[int, ...]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)  # submitted, not ended for the client
    started: set[str] = field(default_factory=set)
    num_submitted: int = 0

    def send(self, event: Event) -> None:
        for effect in self.handoff.handle(event):
            self.apply(effect)
        self.check()

    def apply(self, effect: Effect) -> None:
        match effect:
            case SendPrefill(request_id, block_ids):
                assert self.alive
                assert request_id not in self.at_prefill
                self.at_prefill[request_id] = block_ids
            case SendCancel(request_id):
                assert self.alive
                assert request_id in self.at_prefill
            case FreeBlocks(request_id, block_ids):
                assert request_id not in self.at_prefill, "freed while the peer may still write"
                self.give_back(block_ids)
            case StartDecode(request_id, block_ids):
                assert request_id not in self.started
                assert request_id not in self.at_prefill
                self.started.add(request_id)
                self.decoding[request_id] = block_ids
            case StopDecode(request_id):
                self.give_back(self.decoding.pop(request_id))
            case FailRequest(request_id):
                self.end(request_id)

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        assert self.free.isdisjoint(block_ids), "freed twice"
        self.free.update(block_ids)

    def end(self, request_id: str) -> None:
        assert request_id in self.open, "ended twice"
        self.open.remove(request_id)

    def check(self) -> None:
        held = self.handoff.held_blocks() + [block for blocks in self.decoding.values() for block in blocks]
        assert sorted([*held, *self.free]) == list(range(NUM_BLOCKS))
        live = (Phase.WAITING, Phase.PREFILLING, Phase.DECODING)
        assert self.open == {i for i in self.ids() if self.handoff.phase(i) in live}
        assert self.handoff.count(Phase.PREFILLING, Phase.DECODING) <= 3

    def ids(self) -> list[str]:
        return [f"r{i}" for i in range(self.num_submitted)]

    # What may happen, as far as the other side and the client behave as they promise.

    def submit(self, _pick: int) -> None:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        self.open.add(request_id)
        self.send(Submitted(request_id, at=self.now))

    def reserve(self, pick: int) -> None:
        request_id = self.handoff.next_waiting()
        num_blocks = 1 + pick % 3
        if request_id is not None and num_blocks <= len(self.free):
            block_ids = tuple(sorted(self.free)[:num_blocks])
            self.free.difference_update(block_ids)
            self.send(BlocksReserved(request_id, block_ids))

    def answer(self, pick: int) -> None:
        if self.at_prefill:
            request_id = sorted(self.at_prefill)[pick % len(self.at_prefill)]
            del self.at_prefill[request_id]
            cancelled = self.handoff.phase(request_id) is Phase.CANCELLING
            answers: list[Event] = [PrefillDone(request_id), PrefillFailure(request_id, "internal", "x")]
            answers += [PrefillReleased(request_id)] if cancelled else []
            self.send(answers[pick % len(answers)])

    def abort(self, pick: int) -> None:
        if self.num_submitted:
            request_id = f"r{pick % self.num_submitted}"
            self.open.discard(request_id)  # the client has left; nothing more may be said to it
            self.send(Aborted(request_id))

    def finish(self, pick: int) -> None:
        if self.decoding:
            request_id = sorted(self.decoding)[pick % len(self.decoding)]
            self.give_back(self.decoding.pop(request_id))
            self.end(request_id)
            self.send(DecodeFinished(request_id))

    def tick(self, pick: int) -> None:
        self.now += pick % 7
        self.send(TimePassed(self.now))

    def connect(self, pick: int) -> None:
        if not self.alive:
            self.alive = True
            self.send(PeerConnected())

    def lose(self, pick: int) -> None:
        if self.alive:
            self.alive = False
            self.at_prefill.clear()
            self.send(PeerLost("killed"))


ACTIONS = ["submit", "reserve", "reserve", "answer", "abort", "finish", "tick", "connect", "lose"]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), min_size=20, max_size=120))
def test_no_block_is_lost_and_every_request_ends_once(actions: list[tuple[str, int]]):
    world = World()
    world.connect(0)
    for action, pick in actions:
        getattr(world, action)(pick)

    # From any state: once both sides have said their last word nothing is left.
    world.now += 1000.0
    world.send(TimePassed(world.now))
    while world.at_prefill:
        world.answer(0)
    while world.decoding:
        world.finish(0)
    assert world.free == set(range(NUM_BLOCKS))
    assert world.open == set()
    assert world.handoff.count(*Phase) == 0
    assert world.handoff.next_deadline() is None
