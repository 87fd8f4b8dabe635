"""How many tokens one step may still compute. Pure arithmetic; knows nothing of blocks or queues."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.core.request import Request


@dataclass(slots=True)
class TokenBudget:
    """What is left of a step: tokens in all, and the share of them that prompts may take."""

    num_tokens: int
    num_prompt_tokens: int

    @classmethod
    def for_step(
        cls,
        *,
        max_batched_tokens: int,
        prefill_chunk_tokens: int,
        prefill_token_ratio: float,
        least_prompt_tokens: int,
        num_decoding: int,
    ) -> TokenBudget:
        """The budget of a step in which `num_decoding` requests want one token each.

        Prompts leave room for all of these, and keep to `prefill_token_ratio` of the budget while there are any;
        but they always get `least_prompt_tokens`, so that no setting can starve them.
        """
        prompt = min(prefill_chunk_tokens, max_batched_tokens)
        if num_decoding:
            share = math.floor(prefill_token_ratio * max_batched_tokens + 1e-9)  # 0.29 of 100 is 29, not 28.99...
            least = min(least_prompt_tokens, prompt)
            prompt = max(min(prompt, share, max_batched_tokens - num_decoding), least)
        return cls(max_batched_tokens, prompt)

    def offer(self, request: Request, *, decodes: bool) -> int:
        """How many of its pending tokens `request` may compute in this step."""
        if decodes:
            return min(1, self.num_tokens)
        offer = min(request.num_pending_tokens, self.num_tokens, self.num_prompt_tokens)
        if request.cache.chunk_size is not None:
            offer = min(offer, request.cache.chunk_size)
        return offer

    def spend(self, num_tokens: int, *, decodes: bool) -> None:
        self.num_tokens -= num_tokens
        if not decodes:
            self.num_prompt_tokens -= num_tokens
