"""How much of a process' memory is a file that others map too, as Linux tells it. No torch; knows no engine.

    python -m backends.worker.mappings PID [PID ...]

prints it as JSON for engine processes, and for all of them together. Reading it walks all pages of a process, some
milliseconds: it is for measuring, not for every step. `backends.worker.memory` has a figure that costs nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from backends.models.packed_files import packed_dir

PROC = Path("/proc")
_MAPPING = re.compile(
    r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)"
)  # its addresses, rights, offset, device, inode, path


class Resident(Struct, frozen=True):
    """Bytes in memory. `pss` counts a page that n processes have as 1/n of it, so that it adds up over processes."""

    rss: int = 0
    pss: int = 0
    private: int = 0

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.rss + other.rss, self.pss + other.pss, self.private + other.private)


class Use(Struct, frozen=True):
    all: Resident
    weights: Resident  # of files of packed weights
    pid: int | None = None  # None = of several processes


class Report(Struct, frozen=True):
    """`together` is the sum; its `pss` is what they take, as far as no other process has the same pages."""

    processes: list[Use]
    together: Use


def mappings_of(pid: int | str, folder: Path, proc: Path = PROC) -> tuple[Resident, Resident]:
    """Of the whole process, and of files in `folder`. Raises OSError where there is no such process, or no /proc."""
    whole = within = Resident()
    inside = False
    values: dict[str, int] = {}
    with (proc / str(pid) / "smaps").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mapping = _MAPPING.match(line)
            if mapping:
                whole, within = _added(whole, within, values, inside)
                inside, values = mapping[1].startswith(f"{folder}/"), {}
            elif line.startswith(("Rss:", "Pss:", "Private_")):
                name, _, size = line.partition(":")
                values[name] = int(size.split()[0]) * 1024
    return _added(whole, within, values, inside)


def _added(whole: Resident, within: Resident, values: dict[str, int], inside: bool) -> tuple[Resident, Resident]:
    private = values.get("Private_Clean", 0) + values.get("Private_Dirty", 0)
    one = Resident(values.get("Rss", 0), values.get("Pss", 0), private)
    return whole + one, within + one if inside else within


def report(pids: Iterable[int], folder: Path | None = None, proc: Path = PROC) -> Report:
    found = [Use(*mappings_of(pid, folder or packed_dir(), proc), pid) for pid in pids]
    whole = sum((process.all for process in found), Resident())
    return Report(found, Use(whole, sum((process.weights for process in found), Resident())))


def main(argv: Sequence[str]) -> int:
    if not argv or not all(argument.isdigit() for argument in argv):
        sys.stderr.write("usage: python -m backends.worker.mappings PID [PID ...]\n")
        return 2
    try:
        found = report(map(int, argv))
    except OSError as error:
        sys.stderr.write(f"{error.filename} can't be read: {error.strerror}\n")
        return 1
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
