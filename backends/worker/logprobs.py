"""Logprobs of tokens that were sampled, and of prompts that are to be scored. Knows no text.

A logprob is the log-softmax of the model's raw logits: before penalties, temperature, filters and grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.attention.base import QuerySpan
from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest
from backends.protocol.messages import TokenScore

LEAST_LOGPROB = -9999.0  # told in place of minus infinity, which JSON doesn't have


def token_scores(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenScore]:
    """logits [len(token_ids), vocab_size] -> the score of each row's token, with that many likeliest ones."""
    logprobs = torch.log_softmax(logits.float(), dim=-1).clamp_(min=LEAST_LOGPROB)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    most = min(max(num_top), logits.shape[1])
    likeliest = logprobs.topk(most)
    ids, values = likeliest.indices.tolist(), likeliest.values.tolist()
    return [
        TokenScore(token_id, own[row], list(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]


def score_sampled(logits: Tensor, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
    """Put the scores of the tokens on those requests that ask for them."""
    rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not rows:
        return
    num_top = [requests[row].sampling.logprobs or 0 for row in rows]
    scores = token_scores(logits[rows], [token_ids[row] for row in rows], num_top)
    for row, score in zip(rows, scores, strict=True):
        requests[row].output_scores.append(score)


class PromptRows:
    """Which rows of a step say how likely the next token of a prompt was. Empty where nobody asks."""

    def __init__(self, scheduled: Sequence[ScheduledRequest], spans: Sequence[QuerySpan]) -> None:
        self.rows: list[int] = []
        self._scored: list[tuple[Request, int]] = []  # with the position of the token that is scored
        for item, span in zip(scheduled, spans, strict=True):
            if item.request.sampling.prompt_logprobs is not None:
                self._add(item, span)

    def _add(self, item: ScheduledRequest, span: QuerySpan) -> None:
        request = item.request
        first = max(item.start, len(request.prompt_scores))  # what was scored before a preemption stays
        stop = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
        for position in range(first, stop):
            self.rows.append(span.row + position - item.start)
            self._scored.append((request, position + 1))

    def score(self, logits: Tensor) -> None:
        """logits [len(rows), vocab_size]"""
        token_ids = [request.prompt_token_ids[position] for request, position in self._scored]
        num_top = [request.sampling.prompt_logprobs or 0 for request, _ in self._scored]
        scores = token_scores(logits, token_ids, num_top)
        for (request, _), score in zip(self._scored, scores, strict=True):
            request.prompt_scores.append(score)
