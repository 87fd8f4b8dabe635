"""An engine process binds the thread that computes to its cores, and no other thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.config import EngineConfig
from backends.kv_transfer.pool import TransferPool
from backends.protocol.messages import Ready, Role
from backends.server import devices
from backends.server.devices import PREFILL_NICENESS, bind_computing_threads, give_way
from support.engine_child import engine_child

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists() or len(os.sched_getaffinity(0)) < 2, reason="needs /proc and two cores"
)


def affinities(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


@pytest.mark.parametrize("role", ["merged", "prefill", "decode"])
def test_one_thread_of_an_instance_is_bound_to_its_core(role: str):
    core = max(os.sched_getaffinity(0))
    with engine_child(role=role, cpus=[core]) as child:
        child.read_until(Ready)
        found = affinities(child.process.pid)

    assert [cores for cores in found if cores != os.sched_getaffinity(0)] == [{core}]
    assert len(found) > 1


def test_without_cores_of_its_own_no_thread_is_bound():
    with engine_child() as child:
        child.read_until(Ready)
        assert {frozenset(cores) for cores in affinities(child.process.pid)} == {frozenset(os.sched_getaffinity(0))}


def test_cores_that_are_not_there_do_not_keep_an_instance_from_serving():
    with engine_child(cpus=[4095]) as child:
        child.read_until(Ready)
        assert {frozenset(cores) for cores in affinities(child.process.pid)} == {frozenset(os.sched_getaffinity(0))}


def test_on_a_cuda_device_nothing_is_bound(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []
    monkeypatch.setattr(devices, "bind_this_thread", asked.append)
    bind_computing_threads(EngineConfig(role="merged", model="m", device="cuda:0", cpus=(0,)))
    bind_computing_threads(EngineConfig(role="merged", model="m", device="cpu"))
    assert asked == []
    bind_computing_threads(EngineConfig(role="merged", model="m", device="cpu", cpus=(0,)))
    assert asked == [(0,)]


class _NoLayers:
    """A connector that is never asked for a copy."""

    num_layers = 0

    def close(self) -> None:
        pass


def _until(condition: Callable[[], bool]) -> None:
    """A thread takes its cores back a moment after it has begun."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end


def test_threads_that_copy_kv_are_not_bound_with_the_thread_that_computes():
    core = min(os.sched_getaffinity(0))
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    seen: list[set[int]] = []

    def compute() -> None:
        bind_computing_threads(EngineConfig(role="prefill", model="m", cpus=(core,)))
        pool = TransferPool(_NoLayers(), max_in_flight=4)  # type: ignore[arg-type]
        own = threading.get_native_id()
        started = {int(task.name) for task in Path("/proc/self/task").iterdir() if task.name not in before}
        _until(lambda: all(os.sched_getaffinity(tid) != {core} for tid in started - {own}))
        seen.extend(os.sched_getaffinity(tid) for tid in started - {own})
        seen.append(os.sched_getaffinity(own))
        pool.close()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen[-1] == {core}
    assert seen[:-1] == [os.sched_getaffinity(0)] * min(4, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("role", "niceness"), [("prefill", PREFILL_NICENESS), ("decode", 0), ("merged", 0)])
def test_only_a_prefill_side_gives_way_and_only_by_its_computing_thread(role: Role, niceness: int):
    found: list[int] = []

    def compute() -> None:
        give_way(EngineConfig(role=role, model="m"))
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()

    assert found == [max(before, niceness)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
