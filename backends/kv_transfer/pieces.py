"""Copies many pieces of several layers in one call, so that a copying thread hardly ever holds the interpreter lock.

Each piece copied by Python would take the lock from the thread that computes, for longer than the copy lasts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.kv_transfer.runs import Run
from backends.native.library import load

Pieces = NDArray[np.int64]  # [num_pieces, 3]: source offset, target offset, bytes; within the keys of one layer


def pieces_of(runs: Sequence[Run], *, bytes_per_block: int, bytes_per_slot: int) -> Pieces:
    """Runs that are in one piece on both sides stay whole, others become blocks."""
    found: list[tuple[int, int, int]] = []
    for run in runs:
        first, size = run.first_slot * bytes_per_slot, (run.end_slot - run.first_slot) * bytes_per_slot
        if (run.source_step, run.target_step) == (1, 1):
            whole = (run.num_blocks - 1) * bytes_per_block + size
            found.append((run.source * bytes_per_block + first, run.target * bytes_per_block + first, whole))
            continue
        for i in range(run.num_blocks):
            source, target = run.source + i * run.source_step, run.target + i * run.target_step
            found.append((source * bytes_per_block + first, target * bytes_per_block + first, size))
    return np.array(found, dtype=np.int64).reshape(-1, 3)


class PieceCopier:
    """Between two caches `[num_layers, 2, num_blocks, bytes_per_block]` whose bytes lie without gaps."""

    def __init__(self, source: NDArray[np.uint8], target: NDArray[np.uint8], library: ctypes.CDLL) -> None:
        self._source, self._target = source, target
        self._copy = library.copy_pieces
        self._strides = (source.strides[1], target.strides[1])

    @classmethod
    def make(cls, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> PieceCopier | None:
        """None where there is no compiled library, or a cache has gaps."""
        library = load()
        if not isinstance(library, ctypes.CDLL) or not (source.flags.c_contiguous and target.flags.c_contiguous):
            return None
        return cls(source, target, library)

    def copy(self, layers: Sequence[int], pieces: Pieces) -> None:
        numbers = np.array(layers, dtype=np.int32)
        self._copy(
            self._source.ctypes.data, self._target.ctypes.data, pieces.ctypes.data, len(pieces), numbers.ctypes.data,
            len(numbers), *self._strides,
        )  # fmt: skip
