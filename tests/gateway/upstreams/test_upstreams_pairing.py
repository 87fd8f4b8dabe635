"""When prefill and decode are connected, and when that is tried again."""

from __future__ import annotations

from gateway.upstreams.engine.pairing import Pairing

PIDS = (10, 20)


def connected() -> Pairing:
    pairing = Pairing()
    pairing.sides(PIDS, 1.0)
    assert pairing.due(1.0)
    pairing.reported(True, "", 1.1)
    return pairing


def test_nothing_is_connected_before_both_sides_are_up():
    pairing = Pairing()
    pairing.sides(None, 1.0)

    assert not pairing.due(1.0)
    assert not pairing.connected
    assert pairing.reason


def test_both_sides_are_connected_once_as_soon_as_they_are_up():
    pairing = Pairing()
    pairing.sides(PIDS, 1.0)

    assert [pairing.due(1.0), pairing.due(1.0)] == [True, False]
    pairing.reported(True, "", 1.1)
    assert (pairing.connected, pairing.reason) == (True, "")


def test_a_side_that_was_started_again_is_connected_at_once():
    pairing = connected()
    pairing.sides(None, 2.0)
    assert not pairing.connected
    pairing.sides((10, 21), 3.0)

    assert pairing.due(3.0)
    assert not pairing.connected


def test_a_refusal_is_tried_again_less_and_less_often():
    pairing, now, waits = Pairing(), 0.0, []
    pairing.sides(PIDS, now)
    assert pairing.due(now)
    for _ in range(8):
        pairing.reported(False, "block_size 16 there, 32 here", now)
        assert pairing.deadline is not None
        waits.append(round(pairing.deadline - now, 3))
        now = pairing.deadline
        assert pairing.due(now)

    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert pairing.reason == "block_size 16 there, 32 here"


def test_the_news_of_a_lost_side_that_is_not_back_yet_starts_nothing():
    pairing = connected()
    pairing.sides(None, 2.0)
    pairing.reported(False, "the prefill side is gone", 2.1)

    assert pairing.deadline is None
    assert pairing.reason == "the prefill side is gone"


def test_the_old_connections_end_does_not_outlast_the_new_ones_start():
    pairing = connected()
    pairing.sides((10, 21), 2.0)
    assert pairing.due(2.0)
    pairing.reported(False, "another prefill side took its place", 2.1)
    pairing.reported(True, "", 2.15)

    assert pairing.connected
    assert pairing.deadline is None


def test_two_processes_are_engaged_from_their_first_try_until_its_end_is_told():
    pairing = Pairing()
    pairing.sides(PIDS, 1.0)
    assert not pairing.engaged
    assert pairing.due(1.0)
    assert pairing.engaged
    pairing.reported(True, "", 1.1)
    assert pairing.engaged
    pairing.reported(False, "gone", 1.2)
    assert not pairing.engaged
    assert pairing.due(5.0)
    pairing.sides((10, 21), 6.0)
    assert not pairing.engaged
