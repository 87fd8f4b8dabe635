"""Chooses the next token of each request from its logits. Knows no cache and no model.

A request's choice depends on its own logits, parameters, seed and position only: rows are handled one at a time, and
the random number comes from a function of seed and position instead of a generator with a state. So the same request
gets the same answer in any batch, after a preemption, and in either cache mode.

Order: logit bias, minimum length, penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from backends.core.request import Request
from backends.protocol.messages import SamplingParams

MINUS_INFINITY = float("-inf")


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """logits [len(requests), vocab_size] -> one token id per request."""
    if all(_is_plain_greedy(request) for request in requests):
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    return [_sample_one(row, request) for row, request in zip(logits, requests, strict=True)]


def _is_plain_greedy(request: Request) -> bool:
    return request.sampling.temperature == 0 and not _changes_logits(request)


def _changes_logits(request: Request) -> bool:
    params = request.sampling
    return bool(
        params.logit_bias
        or len(request.output_token_ids) < params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


def _sample_one(logits: Tensor, request: Request) -> int:
    logits = logits.float()
    if _changes_logits(request):
        logits = adjusted_logits(logits, request)
    if request.sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = filtered_probabilities(logits, request.sampling)
    return pick(probabilities, uniform(request.seed, request.num_tokens))


# -------------------------------------------------------------------------------------------------- logits


def adjusted_logits(logits: Tensor, request: Request) -> Tensor:
    params = request.sampling
    logits = logits.clone()
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < logits.shape[0]:  # admission refuses others; here one would take the whole batch down
            logits[token_id] += bias
    if len(request.output_token_ids) < params.min_tokens:
        logits[_ending_token_ids(request, logits.shape[0])] = MINUS_INFINITY
    if params.repetition_penalty != 1:
        _penalize_repetition(logits, request)
    if request.output_token_ids and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(request.output_token_ids), minlength=logits.shape[0]).to(logits.device)
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    return logits


def _ending_token_ids(request: Request, vocab_size: int) -> list[int]:
    eos = frozenset() if request.sampling.ignore_eos else request.eos_token_ids
    return [token_id for token_id in eos | set(request.sampling.stop_token_ids) if 0 <= token_id < vocab_size]


def _penalize_repetition(logits: Tensor, request: Request) -> None:
    """Of prompt and output; dividing a negative logit would favour it."""
    seen = torch.tensor(sorted({*request.prompt_token_ids, *request.output_token_ids}), device=logits.device)
    penalty = request.sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)


# ------------------------------------------------------------------------------------------- probabilities


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in double precision, 0 for what is filtered out; they needn't add up to 1."""
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if 0 < params.top_k < probabilities.shape[0]:
        probabilities = _keep_top_k(probabilities, params.top_k)
    if params.top_p < 1:
        probabilities = _keep_top_p(probabilities, params.top_p)
    return probabilities


def _keep_top_k(probabilities: Tensor, top_k: int) -> Tensor:
    kept = probabilities.topk(top_k)
    return torch.zeros_like(probabilities).scatter_(0, kept.indices, kept.values)


def _keep_top_p(probabilities: Tensor, top_p: float) -> Tensor:
    """The fewest likeliest tokens that together reach `top_p`; at least one."""
    ordered, token_ids = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    ordered[1:][before[1:] >= top_p * ordered.sum()] = 0
    return torch.zeros_like(probabilities).scatter_(0, token_ids, ordered)


def pick(probabilities: Tensor, number: float) -> int:
    """The token whose share of [0, 1) holds `number`, with the shares side by side in the order of token ids."""
    ends = probabilities.cumsum(0)
    index = int(torch.searchsorted(ends, number * ends[-1], right=True))
    if index == len(ends):  # number * total rounded up to the total
        index = int(probabilities.nonzero()[-1])
    return index


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed and position."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
