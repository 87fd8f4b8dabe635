"""Threads that compute stay on their cores; threads for other work are everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from backends.core.cores import bind_this_thread, process_cores, unbind_this_thread

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell apart"
)
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def in_thread(work: Callable[[], object]) -> object:
    """What `work` returns in a thread of its own, so that this one's affinity stays as it is."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def bound_then(work: Callable[[], object]) -> object:
    def bind_and_work() -> object:
        assert bind_this_thread([min(ALL)]) is None
        return work()

    return in_thread(bind_and_work)


def test_a_bound_thread_hands_its_cores_down_and_the_process_keeps_all():
    assert bound_then(lambda: os.sched_getaffinity(0)) == {min(ALL)}
    assert bound_then(lambda: in_thread(lambda: os.sched_getaffinity(0))) == {min(ALL)}
    assert bound_then(process_cores) == len(ALL)
    assert os.sched_getaffinity(0) == ALL


def test_a_helper_of_a_bound_thread_can_take_all_cores_back():
    def helper() -> set[int]:
        unbind_this_thread()
        return os.sched_getaffinity(0)

    assert bound_then(lambda: in_thread(helper)) == ALL


def test_cores_that_are_not_there_are_said_and_change_nothing():
    def bind_wrongly() -> object:
        return bind_this_thread([4095]), os.sched_getaffinity(0)

    reason, left = in_thread(bind_wrongly)  # type: ignore[misc]
    assert reason
    assert left == ALL


COMPUTING = textwrap.dedent(
    """
    import os, threading, torch
    from backends.core.cores import bind_this_thread

    def tids():
        return set(map(int, os.listdir("/proc/self/task")))

    def work():
        before = tids()
        assert bind_this_thread([min(os.sched_getaffinity(0))]) is None
        for num_threads in (2, 1, 3):  # the pool ends threads and starts them again when its size changes
            torch.set_num_threads(num_threads)
            torch.ones(2000, 2000).mm(torch.ones(2000, 2000)).add_(1).sum()
        mine = tids() - before | {threading.get_native_id()}
        print(len(mine), sorted({tuple(os.sched_getaffinity(tid)) for tid in mine}))

    everywhere = len(os.sched_getaffinity(0))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(os.sched_getaffinity(os.getpid())) == everywhere
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_threads_that_openmp_starts_from_a_bound_thread_are_bound_too():
    """In a process of its own: the pool of this one has its threads already."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    run = subprocess.run(
        [sys.executable, "-c", COMPUTING], capture_output=True, text=True, env=environment, check=True, cwd=os.getcwd()
    )
    count, _, bound = run.stdout.strip().partition(" ")

    assert int(count) >= 3
    assert bound == f"[({min(ALL)},)]"
