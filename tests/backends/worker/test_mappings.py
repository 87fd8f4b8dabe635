"""What a process shares with others, read from /proc."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from backends.engines.process_memory import ProcessMemory
from backends.worker.mappings import Resident, Use, main, mappings_of, report
from backends.worker.memory import current_memory

SMAPS = """\
7f0000000000-7f0000010000 r--s 00000000 08:01 42                         /cache/weights/model-1.weights
Size:                 64 kB
Rss:                  48 kB
Pss:                  24 kB
Pss_Dirty:             0 kB
Shared_Clean:         40 kB
Private_Clean:         8 kB
Private_Dirty:         0 kB
VmFlags: rd sh mr mw me ms
7f0000020000-7f0000030000 rw-p 00000000 00:00 0
Rss:                  12 kB
Pss:                  12 kB
Private_Clean:         0 kB
Private_Dirty:        12 kB
7f0000040000-7f0000050000 r-xp 00000000 08:01 43                         /cache/weights-of-others/x.weights
Rss:                   4 kB
Pss:                   1 kB
"""
KIB = 1024
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def fake(tmp_path: Path, *pids: int) -> Path:
    for pid in pids:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps").write_text(SMAPS)
    return tmp_path


def test_weights_are_told_from_the_rest(tmp_path: Path) -> None:
    whole, weights = mappings_of(7, Path("/cache/weights"), fake(tmp_path, 7))
    assert whole == Resident(64 * KIB, 37 * KIB, 20 * KIB)
    assert weights == Resident(48 * KIB, 24 * KIB, 8 * KIB)


def test_pss_of_two_processes_adds_up_to_what_both_take(tmp_path: Path) -> None:
    found = report([7, 8], Path("/cache/weights"), fake(tmp_path, 7, 8))
    assert [process.pid for process in found.processes] == [7, 8]
    assert found.together == Use(Resident(128 * KIB, 74 * KIB, 40 * KIB), Resident(96 * KIB, 48 * KIB, 16 * KIB))


@linux
def test_a_mapped_file_counts_as_shared(tmp_path: Path) -> None:
    size = 8 << 20
    (tmp_path / "file").write_bytes(b"x" * size)
    before = current_memory()
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert pages[:].count(b"x") == size  # now they are in memory
        now = current_memory()
        assert now.shared >= before.shared + size
        assert now.resident >= now.shared
        _, within = mappings_of("self", tmp_path)
        assert within.rss == size


@linux
def test_an_engine_says_how_much_of_its_memory_may_be_shared() -> None:
    reading = ProcessMemory("cpu").read()
    assert 0 < reading.shared_memory_bytes < reading.memory_bytes


@linux
def test_the_command_reads_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(os.getpid())]) == 0
    assert f'"pid": {os.getpid()}' in capsys.readouterr().out
    assert main([]) == 2
    assert main(["self"]) == 2
    assert main(["4194304999"]) == 1
