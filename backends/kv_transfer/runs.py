"""The slots of some tokens as few runs of blocks, on both sides of a transfer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Whole blocks at even steps on both sides, or one block of which only slots [first_slot, end_slot) move.

    A free list gives blocks back in the order they were freed, often downwards: hence steps, which may be negative.
    """

    source: int
    target: int
    num_blocks: int
    source_step: int
    target_step: int
    first_slot: int
    end_slot: int


def runs(
    source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int, block_size: int
) -> Iterator[Run]:
    """Tokens [start, stop) as few runs, in order."""
    pending: Run | None = None
    for index in range(start // block_size, -(-stop // block_size)):
        first_slot = max(start - index * block_size, 0)
        end_slot = min(stop - index * block_size, block_size)
        block = Run(source_block_ids[index], target_block_ids[index], 1, 1, 1, first_slot, end_slot)
        longer = _join(pending, block, block_size) if pending is not None else None
        if longer is None and pending is not None:
            yield pending
        pending = longer or block
    if pending is not None:
        yield pending


def _join(run: Run, block: Run, block_size: int) -> Run | None:
    """The run with the block at its end, or None if it doesn't follow."""
    if (run.end_slot - run.first_slot, block.end_slot - block.first_slot) != (block_size, block_size):
        return None
    if run.num_blocks == 1:
        run = run._replace(source_step=block.source - run.source, target_step=block.target - run.target)
    follows = (
        block.source == run.source + run.num_blocks * run.source_step
        and block.target == run.target + run.num_blocks * run.target_step
    )
    return run._replace(num_blocks=run.num_blocks + 1) if follows else None
