"""Memory of a server's processes, as Linux tells it in /proc. Elsewhere nothing is known, and nothing is said."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")


class Memory(Struct, frozen=True, kw_only=True):
    """Of one process. `pss_bytes` counts a page that n processes share as 1/n of it."""

    pid: int
    rss_bytes: int
    pss_bytes: int


def memory_of(pid: int, proc: Path = PROC) -> Memory | None:
    """None: the process is gone, or this isn't Linux."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
    return Memory(pid=pid, rss_bytes=kibibytes["Rss"] * 1024, pss_bytes=kibibytes["Pss"] * 1024)


def largest_of_tree(root: int, proc: Path = PROC) -> Memory | None:
    """The process with most resident memory among `root` and what it started: the one that holds the model."""
    known = [memory for pid in process_tree(root, proc) if (memory := memory_of(pid, proc)) is not None]
    return max(known, key=lambda memory: memory.rss_bytes, default=None)


def memory_of_tree(root: int, proc: Path = PROC) -> Memory | None:
    """`root` and what it started, added up. Of pages that several of them hold, `rss_bytes` counts each holder's."""
    known = [memory for pid in process_tree(root, proc) if (memory := memory_of(pid, proc)) is not None]
    if not known:
        return None
    rss, pss = sum(memory.rss_bytes for memory in known), sum(memory.pss_bytes for memory in known)
    return Memory(pid=root, rss_bytes=rss, pss_bytes=pss)


def process_tree(root: int, proc: Path = PROC) -> list[int]:
    """`root` and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        parent = _parent(stat)
        if parent is not None:
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, []))
    return found


def _parent(stat: Path) -> int | None:
    try:
        text = stat.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has just ended
        return None
    return int(text.rpartition(")")[2].split()[1])  # a command's name may hold blanks and brackets
