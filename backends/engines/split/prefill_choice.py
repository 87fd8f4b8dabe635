"""Which prefill side computes a prompt: the one that will be through with it first. Pure; knows no sockets, no blocks.

What counts is how many tokens must be computed before the prompt is done: those that a side was asked for and hasn't
answered, and those of the prompt itself that its prefix cache doesn't hold. So a hit of n tokens draws a prompt to a
side that is at most n tokens further behind: a busier one than that loses it, however long the prefix. Among equals
the longer hit wins, then the side that was chosen longest ago.

What a side holds is guessed from what it computed lately, as many blocks as its pool has. A wrong guess costs time,
never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.core.prefix_hash import BlockHash
from backends.engines.split.peer import PeerId


@dataclass(slots=True)
class _Side:
    max_blocks: int
    computed: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)  # latest last
    outstanding: dict[str, int] = field(default_factory=dict)  # request id -> tokens it must compute
    chosen_at: int = 0

    def num_hits(self, hashes: Sequence[BlockHash]) -> int:
        return next((index for index, name in enumerate(hashes) if name not in self.computed), len(hashes))


class PrefillChoice:
    """The prefill sides as seen from one decode side."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._sides: dict[PeerId, _Side] = {}
        self._num_choices = 0

    def add(self, peer: PeerId, *, max_blocks: int) -> None:
        self._sides[peer] = _Side(max_blocks)

    def forget(self, peer: PeerId) -> None:
        """It is gone, and its prefix cache with it."""
        self._sides.pop(peer, None)

    def outstanding_tokens(self, peer: PeerId) -> int:
        return sum(self._sides[peer].outstanding.values())

    def choose(self, candidates: Sequence[PeerId], hashes: Sequence[BlockHash]) -> PeerId:
        """One of the candidates for a prompt whose full blocks have these names."""

        def rank(peer: PeerId) -> tuple[int, int, int]:
            side = self._sides[peer]
            hit = side.num_hits(hashes) * self._block_size
            return self.outstanding_tokens(peer) - hit, -hit, side.chosen_at

        return min(candidates, key=rank)

    def asked(self, peer: PeerId, request_id: str, hashes: Sequence[BlockHash], *, num_tokens: int) -> None:
        side = self._sides[peer]
        self._num_choices += 1
        side.chosen_at = self._num_choices
        side.outstanding[request_id] = max(num_tokens - side.num_hits(hashes) * self._block_size, 1)

    def answered(self, peer: PeerId, request_id: str) -> None:
        """It has nothing more to do for the request. Of what is unknown, nothing happens."""
        if peer in self._sides:
            self._sides[peer].outstanding.pop(request_id, None)

    def computed(self, peer: PeerId, hashes: Sequence[BlockHash]) -> None:
        """It holds these blocks now. The first ones are the last to be forgotten, as in its own pool."""
        side = self._sides.get(peer)
        if side is None:
            return
        for name in reversed(hashes):
            side.computed[name] = None
            side.computed.move_to_end(name)
        while len(side.computed) > side.max_blocks:
            side.computed.popitem(last=False)
