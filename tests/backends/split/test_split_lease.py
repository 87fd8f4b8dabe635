"""Leases: when to speak, and when a silent peer is taken for hung."""

from backends.engines.split.lease import Lease


def test_a_peer_that_says_nothing_for_the_lease_is_hung():
    lease = Lease.begin(9.0, 100.0)

    assert not lease.is_expired(108.9)
    assert lease.is_expired(109.0)
    lease.heard(108.0)
    assert not lease.is_expired(116.9)


def test_a_heartbeat_is_due_each_third_of_the_lease_once():
    lease = Lease.begin(9.0, 100.0)

    assert not lease.beat_is_due(102.9)
    assert lease.beat_is_due(103.0)
    assert not lease.beat_is_due(103.1)
    assert lease.beat_is_due(107.0)  # late
    assert not lease.beat_is_due(109.9)


def test_the_next_deadline_is_the_earlier_of_both():
    lease = Lease.begin(9.0, 100.0)

    assert lease.next_deadline() == 103.0
    lease.beat_is_due(108.0)
    assert lease.next_deadline() == 109.0
