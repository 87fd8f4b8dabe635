"""Gives requests their KV blocks and finds prefixes that are computed already. Knows nothing of steps or budgets."""

from __future__ import annotations

from backends.core.block_pool import BlockPool, KVCacheBlock
from backends.core.prefix_hash import BlockHash, Digest, PrefixKey, blake2b_256, extend
from backends.core.request import Request
from backends.core.scheduler_types import Reservation


class KVCacheManager:
    """The block tables of all requests, kept in `request.blocks`.

    Hits are counted once a request, when it is first admitted: finding one's own blocks again after a preemption
    saves time but is no hit.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, enable_prefix_cache: bool, *, digest: Digest = blake2b_256
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}.")
        self.pool = pool
        self.block_size = block_size
        self._enable_prefix_cache = enable_prefix_cache
        self._digest = digest
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def max_request_tokens(self) -> int:
        """Tokens of one request whose KV the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_computed(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached full blocks that starts `request`. Read only.

        Its last token is never among them: something has to be computed to sample from.
        """
        return self._find(request, (request.num_tokens - 1) // self.block_size)

    def reserve(self, request: Request, *, num_spare_blocks: int = 0) -> Reservation | None:
        """Blocks for a prompt that is computed elsewhere, those that hold a part of it already first; or None.

        All of it may be held: nothing has to be computed here to sample from. `num_spare_blocks` stay free.
        """
        held = self._find(request, request.num_prompt_tokens // self.block_size)
        blocks = self._take(held, self.num_blocks_for(request.num_prompt_tokens), num_spare_blocks)
        return None if blocks is None else Reservation(tuple(blocks), len(held) * self.block_size)

    def prompt_hashes(self, request: Request) -> list[BlockHash]:
        """Names of the full blocks of its prompt, in order; none if it neither reads nor fills a prefix cache."""
        hashes: list[BlockHash] = []
        parent: PrefixKey | None = None
        if self._shares(request) and request.reads_prefix_cache:
            for index in range(request.num_prompt_tokens // self.block_size):
                parent = self._key(request, index, parent)
                hashes.append(parent.block_hash)
        return hashes

    def admit(self, request: Request, *, num_spare_blocks: int = 0) -> bool:
        """Give a request without blocks room for all its tokens, prefix hits first; or False, and nothing changes.

        `num_spare_blocks` must stay free afterwards, for the requests that are running.
        """
        assert not request.blocks, f"{request.request_id} is admitted twice"
        computed = self.find_computed(request)
        blocks = self._take(computed, self.num_blocks_for(request.num_tokens), num_spare_blocks)
        if blocks is None:
            return False
        request.blocks = blocks
        request.num_computed_tokens = len(computed) * self.block_size
        self._count_hits(request)
        return True

    def adopt(self, request: Request, reservation: Reservation) -> None:
        """Take over reserved blocks in which the KV of all of the prompt is by now."""
        assert not request.blocks, f"{request.request_id} has blocks already"
        request.blocks = list(reservation.blocks)
        assert self.num_blocks_for(request.num_computed_tokens) <= len(request.blocks)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = 0
        self.cache_full_blocks(request, since=reservation.num_held_tokens)

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Room for `num_tokens` beyond the computed ones; or False, and nothing changes."""
        num_new = self.num_blocks_for(request.num_computed_tokens + num_tokens) - len(request.blocks)
        blocks = self.pool.allocate(max(num_new, 0))
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def cache_full_blocks(self, request: Request, *, since: int = 0) -> None:
        """Make blocks findable that became full of computed tokens; at `since` computed tokens this was done last."""
        if not self._shares(request):
            return
        first = since // self.block_size
        parent = request.blocks[first - 1].key if first else None
        for index in range(first, request.num_computed_tokens // self.block_size):
            block = request.blocks[index]
            self.pool.mark_full(block, self._key(request, index, parent))
            parent = block.key

    def free(self, request: Request) -> None:
        """Take all blocks back; nothing of the request counts as computed any more."""
        self.pool.free(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0

    def _find(self, request: Request, max_blocks: int) -> list[KVCacheBlock]:
        """The longest run of cached full blocks that starts `request`, up to that many. Read only."""
        blocks: list[KVCacheBlock] = []
        if not (self._shares(request) and request.reads_prefix_cache):
            return blocks
        parent: PrefixKey | None = None
        for index in range(max_blocks):
            block = self.pool.find(self._key(request, index, parent))
            if block is None:
                break
            blocks.append(block)
            parent = block.key
        return blocks

    def _take(self, cached: list[KVCacheBlock], num_blocks: int, num_spare_blocks: int) -> list[KVCacheBlock] | None:
        """Hold `cached` and new ones up to `num_blocks`; or None, and nothing changes."""
        num_new = num_blocks - len(cached)
        num_revived = sum(block.ref_count == 0 for block in cached)
        if num_new + num_revived + num_spare_blocks > self.pool.num_free_blocks:
            return None
        self.pool.touch(cached)
        new = self.pool.allocate(num_new)
        assert new is not None
        return cached + new

    def _shares(self, request: Request) -> bool:
        return self._enable_prefix_cache and request.cache.enable_prefix_cache

    def _count_hits(self, request: Request) -> None:
        if request.num_cached_tokens is not None:
            return
        request.num_cached_tokens = request.num_computed_tokens
        if self._shares(request) and request.reads_prefix_cache:
            self.prefix_query_tokens += request.num_prompt_tokens
            self.prefix_hit_tokens += request.num_computed_tokens

    def _key(self, request: Request, index: int, parent: PrefixKey | None) -> PrefixKey:
        start, stop = index * self.block_size, (index + 1) * self.block_size
        tokens = token_ids_between(request, start, stop)
        return extend(parent, tokens, salt=request.cache.cache_salt, digest=self._digest)


def token_ids_between(request: Request, start: int, stop: int) -> list[int]:
    """Tokens [start, stop) of prompt and output, without joining the two whole lists."""
    num_prompt = request.num_prompt_tokens
    if stop <= num_prompt:
        return request.prompt_token_ids[start:stop]
    tokens = request.prompt_token_ids[start:]
    return tokens + request.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]
