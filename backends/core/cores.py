"""Which cores the threads of this process run on. Knows the operating system alone; does nothing where it can't bind.

An affinity belongs to a thread and is inherited by those that it starts. So the engine's thread is bound before OpenMP
starts its own, and whoever the engine starts for something else takes the main thread's affinity back.
"""

from __future__ import annotations

import os
from collections.abc import Collection


def bind_this_thread(cpus: Collection[int]) -> str | None:
    """Run on these cores alone. Returns why not, if that can't be."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system can't bind threads to cores"
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def unbind_this_thread() -> None:
    """Run wherever the process may, although the thread that started this one is bound."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


def process_cores() -> int:
    """How many cores the process may use, however the calling thread is bound."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(os.getpid()))
    return os.cpu_count() or 1
