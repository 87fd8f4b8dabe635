"""What a scheduler tells a model runner: which requests advance this step, and by how many tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from backends.core.block_pool import KVCacheBlock
from backends.core.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`request` computes the KV of its tokens [start, start + num_tokens) in this step.

    `request.blocks` already covers them. If that reaches `request.num_tokens`, the step samples its next token.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Blocks for a prompt that is computed elsewhere. The first ones hold the KV of `num_held_tokens` already.

    Held blocks are full and may be shared with others: nobody writes to them.
    """

    blocks: tuple[KVCacheBlock, ...]
    num_held_tokens: int

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.blocks)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
