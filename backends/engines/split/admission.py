"""What a decode side refuses before it takes a request, and what it then asks of a prefill side. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from backends.core.errors import RequestRefused, queue_full
from backends.core.request import Request
from backends.core.sampling_check import scoring_chunk
from backends.core.scheduler_types import Reservation
from backends.protocol.messages import EngineInfo, Prefill, TransferMode


def fits_peer(request: Request, peer: EngineInfo) -> bool:
    """Whether its pool holds the prompt and one token more, which any scheduler asks for."""
    return request.num_prompt_tokens + 1 <= peer.num_blocks * peer.block_size


def too_long_for_peers(request: Request, peers: Iterable[EngineInfo]) -> RequestRefused:
    """What to say of a prompt that none of the prefill sides could ever compute."""
    max_tokens = max((peer.num_blocks * peer.block_size for peer in peers), default=0)
    return RequestRefused(
        "kv_pool_too_small",
        f"The prompt has {request.num_prompt_tokens} tokens; with one token of answer it can never fit the prefill "
        f"instance's KV pool of {max_tokens} tokens. Shorten the prompt or give that instance a larger KV pool.",
    )


def check_queue(num_waiting: int, *, max_waiting: int) -> None:
    if num_waiting >= max_waiting:
        raise queue_full(num_waiting)


def prefill_message(request: Request, reservation: Reservation, *, default_mode: TransferMode) -> Prefill:
    """A chunk size has no effect in split: no decode step is there to make room for.

    Of a grammar, the first token's mask is all that the prefill side needs.
    """
    params = request.sampling
    chunk_size = None if params.prompt_logprobs is None else scoring_chunk(request.cache.chunk_size)
    return Prefill(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        block_ids=list(reservation.block_ids),
        num_held_tokens=reservation.num_held_tokens,
        sampling=msgspec.structs.replace(params, grammar=None, stop=()),
        cache=msgspec.structs.replace(request.cache, chunk_size=chunk_size),
        transfer_mode=request.cache.transfer_mode or default_mode,
        seed=request.seed,
        eos_token_ids=sorted(request.eos_token_ids),
        allowed_first_tokens=None if request.grammar is None else request.grammar.allowed(()),
    )
