"""Chooses the next token of each request from its logits. Knows no cache and no model.

A request's choice depends on its own logits, parameters, seed and position only: rows are handled one at a time, and
the random number comes from a function of seed and position instead of a generator with a state. So the same request
gets the same answer in any batch, after a preemption, and in either cache mode.

Order: grammar, logit bias, minimum length, penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.core.request import Request
from backends.protocol.messages import SamplingParams

MINUS_INFINITY = float("-inf")
FIRST_GUESS = 64  # tokens that mostly make up top_p: then nothing needs to be sorted


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """logits [len(requests), vocab_size] -> one token id per request."""
    if all(request.takes_likeliest for request in requests):
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    return [_sample_one(row, request) for row, request in zip(logits, requests, strict=True)]


def _sample_one(logits: Tensor, request: Request) -> int:
    logits = logits.float()
    if _changes_logits(request):
        logits = adjusted_logits(logits, request)
    if request.sampling.temperature == 0:
        return int(logits.argmax())
    return pick(candidates(logits, request.sampling), uniform(request.seed, request.num_tokens))


def _changes_logits(request: Request) -> bool:
    params = request.sampling
    return bool(
        request.grammar is not None
        or params.logit_bias
        or len(request.output_token_ids) < params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


# -------------------------------------------------------------------------------------------------- logits


def adjusted_logits(logits: Tensor, request: Request) -> Tensor:
    params = request.sampling
    logits = logits.clone()
    if request.grammar is not None:
        _forbid(logits, request.grammar.allowed(request.output_token_ids))
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < logits.shape[0]:  # admission refuses others; here one would take the whole batch down
            logits[token_id] += bias
    if len(request.output_token_ids) < params.min_tokens:
        _forbid_endings(logits, request)
    if params.repetition_penalty != 1:
        _penalize_repetition(logits, request)
    if request.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(request.output_token_ids), minlength=logits.shape[0]).to(logits.device)
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    return logits


def _forbid(logits: Tensor, allowed: bytes) -> None:
    """Everything whose bit isn't set; tokens beyond the mask are those that no text has."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=logits.shape[0], bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), MINUS_INFINITY)


def _forbid_endings(logits: Tensor, request: Request) -> None:
    """Where a grammar leaves nothing but an end, it ends."""
    ending = _ending_token_ids(request, logits.shape[0])
    kept = logits[ending]
    logits[ending] = MINUS_INFINITY
    if request.grammar is not None and not (logits > MINUS_INFINITY).any():
        logits[ending] = kept


def _ending_token_ids(request: Request, vocab_size: int) -> list[int]:
    params = request.sampling
    if request.grammar is not None:
        ending = request.eos_token_ids
    else:
        ending = (frozenset() if params.ignore_eos else request.eos_token_ids) | set(params.stop_token_ids)
    return [token_id for token_id in ending if 0 <= token_id < vocab_size]


def _penalize_repetition(logits: Tensor, request: Request) -> None:
    """Of prompt and output; dividing a negative logit would favour it."""
    seen = torch.tensor(sorted({*request.prompt_token_ids, *request.output_token_ids}), device=logits.device)
    penalty = request.sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)


# ---------------------------------------------------------------------------------------------- candidates


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be picked, in the order of their ids; their weights needn't add up to 1."""

    weights: Tensor  # double [n]
    token_ids: Tensor | None = None  # int64 [n]; None: token i is the i-th


def candidates(logits: Tensor, params: SamplingParams) -> Candidates:
    """What min_p, top_k and top_p leave, with probabilities in double precision."""
    weights = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.min_p > 0:
        weights[weights < params.min_p * weights.max()] = 0
    kept = Candidates(weights)
    if 0 < params.top_k < weights.shape[0]:
        kept = _keep_likeliest(kept, params.top_k, weights.topk(params.top_k).values[-1])
    if params.top_p < 1:
        kept = _keep_likeliest(kept, *_nucleus(kept.weights, params.top_p))
    return kept


def _keep_likeliest(tokens: Candidates, count: int, least: Tensor) -> Candidates:
    """`count` tokens, the last of which has the weight `least`; of equally likely ones those with the lowest ids."""
    weights = tokens.weights
    positions = (weights >= least).nonzero().squeeze(1)
    num_excess = len(positions) - count
    if num_excess:
        is_least = weights[positions] == least
        positions = positions[~is_least | (is_least.cumsum(0) <= is_least.sum() - num_excess)]
    token_ids = positions if tokens.token_ids is None else tokens.token_ids[positions]
    return Candidates(weights[positions], token_ids)


def _nucleus(weights: Tensor, top_p: float) -> tuple[int, Tensor]:
    """How many of the likeliest tokens it takes to reach `top_p` of all, at least one; and the last one's weight."""
    limit = top_p * weights.sum()
    ordered = weights.topk(min(FIRST_GUESS, len(weights))).values
    ends = ordered.cumsum(0)
    if ends[-1] < limit:
        # Of a flat distribution all are sorted, by numpy: it takes a tenth of torch's time.
        ordered = torch.from_numpy(np.sort(weights.cpu().numpy())[::-1].copy()).to(weights.device)
        ends = ordered.cumsum(0)
    count = 1 + int((ends[:-1] < limit).sum())
    return count, ordered[count - 1]


def pick(tokens: Candidates, number: float) -> int:
    """The token whose share of [0, 1) holds `number`, with the shares side by side in the order of token ids."""
    ends = tokens.weights.cumsum(0)
    index = int(torch.searchsorted(ends, number * ends[-1], right=True))
    if index == len(ends):  # number * total rounded up to the total
        index = int(tokens.weights.nonzero()[-1])
    return index if tokens.token_ids is None else int(tokens.token_ids[index])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
