"""How a best time is found, on a scripted clock. The speeds themselves are checked for nothing but being one."""

from __future__ import annotations

from backends import machine


def test_the_best_run_counts_after_one_that_does_not():
    instants = iter([0.0, 5.0, 10.0, 12.0, 20.0, 24.0])
    runs: list[int] = []

    assert machine.best_seconds(lambda: runs.append(1), lambda: next(instants)) == 2.0
    assert len(runs) == 1 + machine.MIN_RUNS


def test_short_work_is_repeated_until_enough_time_has_passed():
    now = [0.0]

    def clock():
        now[0] += 0.125
        return now[0]

    runs: list[int] = []
    assert machine.best_seconds(lambda: runs.append(1), clock) == 0.125
    assert len(runs) == 1 + machine.MIN_SECONDS / 0.125


def test_speeds_are_positive_on_small_work(monkeypatch):
    monkeypatch.setattr(machine, "MIN_SECONDS", 0.0)

    assert machine.memory_read_speed(1 << 16) > 0
    assert machine.matmul_speed(16, 32) > 0
