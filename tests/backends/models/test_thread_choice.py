"""Decode steps use the number of threads that is faster now, and notice when that changes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.models.thread_choice import ThreadChoice

IDLE = {1: 3.2, 2: 2.3}
JITTER = (1.0, 3.0, 0.4, 1.5, 5.0)  # of threads that wait for one another on a busy machine


def idle(threads: int) -> float:
    return IDLE[threads]


class Busy:
    """One thread is slowed a little; several wait for one another."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, threads: int) -> float:
        self.step += 1
        return 5.0 if threads == 1 else 40.0 * JITTER[self.step % len(JITTER)]


def run(choice: ThreadChoice, num_steps: int, seconds: Callable[[int], float], work: str = "w") -> list[int]:
    chosen = []
    for _ in range(num_steps):
        threads = choice.choose(work)
        chosen.append(threads)
        choice.record(work, threads, seconds(threads))
    return chosen


def test_on_an_idle_machine_all_steps_use_all_threads():
    chosen = run(ThreadChoice(2), 1000, idle)

    assert chosen[0] == 2
    assert chosen == [2] * 1000


def test_a_busy_machine_is_noticed_within_a_few_steps_and_its_end_too():
    choice = ThreadChoice(2)
    run(choice, 100, idle)

    busy = run(choice, 200, Busy())
    assert set(busy[8:32]) == {1}
    assert busy.count(2) <= 20

    run(choice, 300, idle)
    assert run(choice, 40, idle).count(2) >= 30


def test_a_machine_that_is_busy_from_the_start_is_noticed():
    chosen = run(ThreadChoice(2), 200, Busy())

    assert chosen.count(2) <= 30


def test_one_slow_step_changes_nothing():
    choice = ThreadChoice(2)
    run(choice, 20, idle)
    choice.record("w", 2, 1.0e3)

    assert choice.choose("w") == 2


def test_works_are_judged_apart():
    choice = ThreadChoice(2)
    run(choice, 30, Busy(), "short")

    assert choice.choose("short") == 1
    assert choice.choose("long") == 2


def test_a_single_thread_has_no_choice():
    assert set(run(ThreadChoice(1), 300, idle)) == {1}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=300))
def test_any_times_give_a_valid_choice(times: list[float]):
    choice = ThreadChoice(4)
    for seconds in times:
        threads = choice.choose("w")
        assert threads in (1, 4)
        choice.record("w", threads, seconds)
