"""How the cores of this machine are divided between engine instances. Pure but for counting the cores."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Share:
    """Of one instance: how many threads compute, and on which cores alone; None = wherever the system says."""

    num_threads: int
    cpus: tuple[int, ...] | None = None


def available_cores() -> int:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = len(_allowed() or ()) or os.cpu_count() or 1
    try:
        quota, period = CGROUP_CPU_MAX.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cores


def bindable_cores(num_cores: int) -> tuple[int, ...] | None:
    """The cores themselves, if they are all that this process may use.

    Under a quota the system chooses among more cores than the quota pays for: to be bound to a few of them would be
    to wait for whoever else is there.
    """
    allowed = _allowed()
    return tuple(sorted(allowed)) if allowed is not None and len(allowed) == num_cores else None


def _allowed() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def divide(num_cores: int, num_instances: int, cpus: Sequence[int] | None) -> list[Share]:
    """A share for each instance, as even as can be; the first ones get what is left over.

    With fewer cores than instances each still gets one thread: who calls has decided that they may share.
    Who owns all cores is bound to none.
    """
    each, rest = divmod(num_cores, num_instances)
    counts = [each + (i < rest) for i in range(num_instances)]
    if cpus is None or num_instances == 1 or each == 0:
        return [Share(max(1, count)) for count in counts]
    starts = [sum(counts[:i]) for i in range(num_instances)]
    return [Share(count, tuple(cpus[start : start + count])) for start, count in zip(starts, counts, strict=True)]
