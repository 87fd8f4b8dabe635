"""The handoff state machine: each transition as a fact."""

import pytest

from backends.engines.split.events import (
    Aborted,
    BlocksReserved,
    DecodeFinished,
    Effect,
    Event,
    FailRequest,
    FreeBlocks,
    PeerConnected,
    PeerHung,
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
    Unplaceable,
)
from backends.engines.split.handoff import MAX_FAILOVERS, Handoff, Phase
from backends.engines.split.peer import PeerId

BLOCKS = (4, 7)
P, Q = PeerId("p", 1), PeerId("q", 2)


def make_handoff(*peers: PeerId, max_active: int = 4) -> Handoff:
    handoff = Handoff(max_active=max_active, timeout_seconds=10.0)
    for peer in peers:
        handoff.handle(PeerConnected(peer))
    return handoff


def handoff_in(phase: Phase | None, *peers: PeerId) -> Handoff:
    """A handoff whose only request, "a", arrived at 0 and is in `phase`; P was asked."""
    handoff = make_handoff(*peers or (P,))
    if phase is None:
        return handoff
    handoff.handle(Submitted("a", at=0.0))
    if phase is not Phase.WAITING:
        handoff.handle(BlocksReserved("a", P, BLOCKS))
    if phase is Phase.DECODING:
        handoff.handle(PrefillDone("a", P))
    if phase is Phase.CANCELLING:
        handoff.handle(Aborted("a"))
    assert handoff.phase("a") is phase
    return handoff


FREE = FreeBlocks("a", P, BLOCKS)
START = StartDecode("a", P, BLOCKS)
TOO_LONG = Unplaceable("a", "kv_pool_too_small", "too long")
STEPS: list[tuple[Phase | None, Event, list[Effect], Phase | None]] = [
    (Phase.WAITING, BlocksReserved("a", P, BLOCKS), [SendPrefill("a", P, BLOCKS)], Phase.PREFILLING),
    (Phase.WAITING, BlocksReserved("a", Q, BLOCKS), [FreeBlocks("a", Q, BLOCKS)], Phase.WAITING),
    (Phase.WAITING, TOO_LONG, [FailRequest("a", "kv_pool_too_small", "too long")], None),
    (Phase.WAITING, Aborted("a"), [], None),
    (Phase.WAITING, PrefillDone("a", P), [], Phase.WAITING),
    (Phase.WAITING, PrefillReleased("a", P), [], Phase.WAITING),
    (Phase.PREFILLING, PrefillDone("a", P), [START], Phase.DECODING),
    (Phase.PREFILLING, PrefillDone("a", Q), [], Phase.PREFILLING),
    (Phase.PREFILLING, TOO_LONG, [], Phase.PREFILLING),
    (Phase.PREFILLING, Aborted("a"), [SendCancel("a", P)], Phase.CANCELLING),
    (Phase.PREFILLING, PeerLost(Q, "killed"), [], Phase.PREFILLING),
    (
        Phase.PREFILLING,
        PrefillFailure("a", P, "queue_full", "no room"),
        [FREE, FailRequest("a", "queue_full", "no room")],
        None,
    ),
    (Phase.CANCELLING, PrefillDone("a", P), [FREE], None),
    (Phase.CANCELLING, PrefillDone("a", Q), [], Phase.CANCELLING),
    (Phase.CANCELLING, PrefillFailure("a", P, "internal", "x"), [FREE], None),
    (Phase.CANCELLING, PrefillReleased("a", P), [FREE], None),
    (Phase.CANCELLING, Aborted("a"), [], Phase.CANCELLING),
    (Phase.CANCELLING, PeerLost(P, "killed"), [FREE], None),
    (Phase.CANCELLING, PeerHung(P, "silent"), [], Phase.CANCELLING),
    (Phase.CANCELLING, TimePassed(1e9), [], Phase.CANCELLING),
    (Phase.DECODING, Aborted("a"), [StopDecode("a")], None),
    (Phase.DECODING, DecodeFinished("a"), [], None),
    (Phase.DECODING, PeerLost(P, "killed"), [], Phase.DECODING),
    (Phase.DECODING, PeerHung(P, "silent"), [], Phase.DECODING),
    (Phase.DECODING, TimePassed(1e9), [], Phase.DECODING),  # its own deadline is an abort to this machine
    (Phase.DECODING, PrefillDone("a", P), [], Phase.DECODING),
    (Phase.DECODING, PrefillReleased("a", P), [], Phase.DECODING),
    (None, BlocksReserved("a", P, BLOCKS), [FREE], None),
    (None, PrefillDone("a", P), [], None),
    (None, Aborted("a"), [], None),
    (None, PeerLost(Q, "killed"), [], None),
]


@pytest.mark.parametrize(("phase", "event", "effects", "after"), STEPS)
def test_each_event_in_each_phase(phase: Phase | None, event: Event, effects: list[Effect], after: Phase | None):
    handoff = handoff_in(phase)

    assert list(handoff.handle(event)) == effects
    assert handoff.phase("a") is after


def failures(effects: list[Effect]) -> list[FailRequest]:
    return [effect for effect in effects if isinstance(effect, FailRequest)]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING])
def test_the_loss_of_the_last_prefill_side_fails_what_needs_one(phase: Phase):
    handoff = handoff_in(phase)

    effects = list(handoff.handle(PeerLost(P, "killed by signal 9")))

    (failure,) = failures(effects)
    assert failure.code == "peer_lost"
    assert "'p' died (killed by signal 9)" in failure.message
    assert (FREE in effects) is (phase is Phase.PREFILLING)
    assert handoff.phase("a") is None


@pytest.mark.parametrize("event", [PeerLost(P, "killed"), PeerHung(P, "silent")])
def test_with_another_prefill_side_a_request_waits_for_it_in_its_old_place(event: PeerLost | PeerHung):
    handoff = handoff_in(Phase.PREFILLING, P, Q)
    handoff.handle(Submitted("b", at=5.0))

    effects = list(handoff.handle(event))

    assert effects == ([FREE] if isinstance(event, PeerLost) else [])
    assert handoff.next_waiting() == "a"
    assert handoff.next_deadline() == 10.0
    assert list(handoff.handle(BlocksReserved("a", Q, (1,)))) == [SendPrefill("a", Q, (1,))]
    assert list(handoff.handle(PrefillDone("a", Q))) == [StartDecode("a", Q, (1,))]


def test_what_a_hung_side_was_lent_is_held_until_its_end():
    handoff = handoff_in(Phase.PREFILLING)

    (failure,) = handoff.handle(PeerHung(P, "silent"))

    assert isinstance(failure, FailRequest)
    assert "'p' does not answer (silent)" in failure.message
    assert not handoff.connected
    assert handoff.phase("a") is Phase.CANCELLING
    assert handoff.held_blocks() == list(BLOCKS)
    assert list(handoff.handle(PeerLost(P, "killed"))) == [FREE]
    assert handoff.phase("a") is None


def test_a_late_answer_of_a_hung_side_gives_its_blocks_back_and_starts_nothing():
    handoff = handoff_in(Phase.PREFILLING, P, Q)
    handoff.handle(PeerHung(P, "silent"))
    handoff.handle(BlocksReserved("a", Q, (1, 2)))

    assert list(handoff.handle(PrefillDone("a", P))) == [FREE]
    assert handoff.phase("a") is Phase.PREFILLING
    assert list(handoff.handle(PrefillDone("a", Q))) == [StartDecode("a", Q, (1, 2))]


def test_an_aborted_request_asks_only_the_side_that_has_it_to_stop():
    handoff = handoff_in(Phase.PREFILLING, P, Q)
    handoff.handle(PeerHung(P, "silent"))
    handoff.handle(BlocksReserved("a", Q, (1, 2)))

    assert list(handoff.handle(Aborted("a"))) == [SendCancel("a", Q)]
    assert sorted(handoff.held_blocks()) == [1, 2, *BLOCKS]
    assert handoff.count(Phase.CANCELLING) == 2


def test_cancelled_then_prefilled_all_the_same_starts_nothing():
    handoff = handoff_in(Phase.PREFILLING)

    assert list(handoff.handle(Aborted("a"))) == [SendCancel("a", P)]
    assert list(handoff.handle(PrefillDone("a", P))) == [FREE]  # it was on its way
    assert list(handoff.handle(PrefillReleased("a", P))) == []
    assert handoff.count(*Phase) == 0


def test_a_prompt_that_ends_every_side_that_computes_it_is_given_up():
    handoff = make_handoff(*(PeerId("p", number) for number in range(MAX_FAILOVERS + 2)))
    handoff.handle(Submitted("a", at=0.0))
    for number in range(MAX_FAILOVERS):
        handoff.handle(BlocksReserved("a", PeerId("p", number), BLOCKS))
        assert failures(list(handoff.handle(PeerLost(PeerId("p", number), "killed")))) == []
    last = PeerId("p", MAX_FAILOVERS)
    handoff.handle(BlocksReserved("a", last, BLOCKS))

    (failure,) = failures(list(handoff.handle(PeerLost(last, "killed"))))

    assert failure.code == "peer_lost"
    assert handoff.connected


@pytest.mark.parametrize(
    ("phase", "beside", "after"),
    [(Phase.WAITING, [], None), (Phase.PREFILLING, [SendCancel("a", P)], Phase.CANCELLING)],
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


def test_a_request_is_refused_while_no_prefill_side_is_there():
    handoff = make_handoff()

    (failure,) = handoff.handle(Submitted("a", at=0.0))

    assert isinstance(failure, FailRequest)
    assert failure.code == "peer_lost"
    assert handoff.phase("a") is None


def test_requests_start_in_order_of_arrival_and_no_more_than_max_active():
    handoff = make_handoff(P, max_active=1)
    for request_id in "abc":
        handoff.handle(Submitted(request_id, at=0.0))

    assert handoff.next_waiting() == "a"
    handoff.handle(BlocksReserved("a", P, BLOCKS))
    assert handoff.next_waiting() is None
    handoff.handle(Aborted("a"))  # its blocks are still lent, its place is not
    assert handoff.next_waiting() == "b"
    assert handoff.held_blocks() == list(BLOCKS)
