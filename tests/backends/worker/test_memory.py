"""Memory figures of this process."""

from __future__ import annotations

import sys

import pytest

from backends.worker.memory import PeakMemory, current_memory

MIB = 2**20
SIZE = 64 * MIB


def test_memory_that_is_touched_shows() -> None:
    before = current_memory().memory
    block = b"x" * SIZE
    assert current_memory().memory >= before + 60 * MIB
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't reset their peak")
def test_a_peak_outlives_its_memory_until_it_is_reset() -> None:
    peak = PeakMemory()
    before = peak.update()
    block = b"x" * SIZE
    del block
    assert peak.update() >= before + 60 * MIB
    peak.reset()
    assert peak.update() < before + 30 * MIB
