"""Remembers how to copy a part of a request: it is the same in every layer, and costs more Python than the copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from backends.kv_transfer.runs import Run, runs

BlockIds = Sequence[int]
Plan = TypeVar("Plan")
MAX_PARTS = 256


class PartCache(Generic[Plan]):
    """Plans of the parts copied last. Block tables are told apart by identity: a table once given must not change."""

    def __init__(self, block_size: int, plan: Callable[[list[Run]], Plan]) -> None:
        self._block_size = block_size
        self._plan = plan
        self._lock = threading.Lock()
        # the tables are kept as well, or their ids could come to name others
        self._known: OrderedDict[tuple[int, int, int, int], tuple[BlockIds, BlockIds, Plan]] = OrderedDict()

    def plan(self, source_block_ids: BlockIds, target_block_ids: BlockIds, start: int, stop: int) -> Plan:
        key = (id(source_block_ids), id(target_block_ids), start, stop)
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return known[2]
        found = runs(source_block_ids, target_block_ids, start, stop, self._block_size)
        plan = self._plan([upwards(run) for run in found])
        with self._lock:
            self._known[key] = (source_block_ids, target_block_ids, plan)
            while len(self._known) > MAX_PARTS:
                self._known.popitem(last=False)
        return plan


def upwards(run: Run) -> Run:
    """The same blocks from the lowest on, where both sides go down one by one: memory in one piece."""
    if (run.source_step, run.target_step) != (-1, -1):
        return run
    lower = run.num_blocks - 1
    return run._replace(source=run.source - lower, target=run.target - lower, source_step=1, target_step=1)
