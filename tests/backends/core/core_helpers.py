"""Builders for tests of the core, and a stand-in for a model that only counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.prefix_hash import blake2b_256
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import SchedulerOutput
from backends.protocol.messages import CacheParams, SamplingParams


def make_request(
    request_id: str = "r",
    *,
    tokens: Sequence[int] | None = None,
    num_tokens: int = 4,
    cache: CacheParams | None = None,
    sampling: SamplingParams | None = None,
    max_tokens: int = 100,
    eos_token_ids: frozenset[int] = frozenset(),
) -> Request:
    """A request whose tokens, if only their number is given, are shared with no other id."""
    if tokens is None:
        tokens = [zlib.crc32(request_id.encode()) * 1000 + index for index in range(num_tokens)]
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
        sampling=sampling or SamplingParams(),
        cache=cache or CacheParams(),
        seed=0,
        arrived_at=0.0,
    )


def make_manager(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    enable_prefix_cache: bool = True,
    digest: Callable[[bytes], bytes] = blake2b_256,
) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size, enable_prefix_cache, digest=digest)


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    max_batched_tokens: int = 64,
    prefill_chunk_tokens: int = 64,
    prefill_token_ratio: float = 1.0,
    max_num_seqs: int = 16,
    max_waiting: int = 16,
) -> Scheduler:
    return Scheduler(
        make_manager(num_blocks=num_blocks, block_size=block_size),
        max_batched_tokens=max_batched_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        prefill_token_ratio=prefill_token_ratio,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )


def step(scheduler: Scheduler, *, token: int = 7) -> SchedulerOutput:
    """One step of a model that always says `token`."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, [token if item.samples else None for item in output.scheduled])
    scheduler.check_integrity()
    return output


def tokens_per_request(output: SchedulerOutput) -> dict[str, int]:
    return {item.request.request_id: item.num_tokens for item in output.scheduled}


def pool_of(scheduler: Scheduler) -> BlockPool:
    return scheduler.manager.pool
