"""One prompt on the prefill side: how far it is computed and copied, and what is said of it. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from backends.core.block_pool import KVCacheBlock
from backends.core.request import Request, TokenGrammar
from backends.core.scheduler_types import ScheduledRequest
from backends.kv_transfer.pool import Part, Transfer, TransferPool
from backends.protocol.messages import Prefill, Prefilled, TransferMode


@dataclass(frozen=True, slots=True)
class FirstTokens(TokenGrammar):
    """The one step of a grammar that is taken here."""

    mask: bytes

    @override
    def allowed(self, output_token_ids: Sequence[int]) -> bytes:
        return self.mask

    @override
    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        return False

    @override
    def fresh(self) -> TokenGrammar:
        return self


@dataclass(slots=True, eq=False)
class PrefillWork:
    """A request from `Prefill` to its answer."""

    request: Request
    transfer: Transfer
    mode: TransferMode
    started: bool = False
    num_sent_tokens: int = 0  # there already, copied, or handed to the pool
    token_id: int | None = None  # sampled; from then on the scheduler has forgotten the request
    held: list[KVCacheBlock] = field(default_factory=list)  # kept from reuse while copies out of them run
    peak_kv_blocks: int = 0

    @classmethod
    def begin(cls, message: Prefill, *, at: float) -> PrefillWork:
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.token_ids,
            max_tokens=1,
            eos_token_ids=frozenset(message.eos_token_ids),
            sampling=message.sampling,
            cache=message.cache,
            seed=message.seed,
            arrived_at=at,
            grammar=None if message.allowed_first_tokens is None else FirstTokens(message.allowed_first_tokens),
        )
        transfer = Transfer(tuple(message.block_ids))
        return cls(request, transfer, message.transfer_mode, num_sent_tokens=message.num_held_tokens)

    def send_computed(self, item: ScheduledRequest, pool: TransferPool) -> list[Part]:
        """Hand to the pool what the cache holds already; return the part that the coming step computes."""
        block_ids = _block_ids(item.request.blocks)
        if item.start > self.num_sent_tokens:  # prefix hits
            pool.submit_all_layers(Part(self.transfer, block_ids, self.num_sent_tokens, item.start))
            self.num_sent_tokens = item.start
        stop = item.start + item.num_tokens
        if stop <= self.num_sent_tokens:  # computed once more, after a preemption
            return []
        part = Part(self.transfer, block_ids, self.num_sent_tokens, stop)
        self.num_sent_tokens = stop
        return [part]

    def send_rest(self, pool: TransferPool) -> None:
        """Hand to the pool what the held blocks have and the decode side hasn't."""
        num_tokens = self.request.num_prompt_tokens
        if self.num_sent_tokens < num_tokens:
            pool.submit_all_layers(Part(self.transfer, _block_ids(self.held), self.num_sent_tokens, num_tokens))
            self.num_sent_tokens = num_tokens

    def prefilled(self, peak_memory_bytes: int) -> Prefilled:
        """The answer, once all is computed and copied."""
        request, transfer = self.request, self.transfer
        assert self.token_id is not None
        assert request.first_scheduled_at is not None
        assert request.first_token_at is not None
        computing = (request.first_scheduled_at, request.first_token_at)
        return Prefilled(
            request_id=request.request_id,
            token_id=self.token_id,
            first_scheduled_at=request.first_scheduled_at,
            sampled_at=request.first_token_at,
            cached_tokens=request.num_cached_tokens or 0,
            transfer_seconds=transfer.seconds(),
            transfer_overlapped_seconds=transfer.overlapped_seconds(computing),
            transfer_bytes=transfer.num_bytes,
            num_preemptions=request.num_preemptions,
            peak_kv_blocks=self.peak_kv_blocks,
            peak_memory_bytes=peak_memory_bytes,
            score=request.output_scores[0] if request.output_scores else None,
            prompt_scores=request.prompt_scores,
        )


def _block_ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]
