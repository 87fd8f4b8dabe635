"""Scheduled requests -> the tensors of one step. Knows no model and computes nothing.

Rows are the scheduled tokens of all requests, one request after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.attention.base import PagedStep, QuerySpan
from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    token_ids: Tensor  # int64 [num_rows]
    positions: Tensor  # int64 [num_rows]
    step: PagedStep
    sample_rows: Tensor  # int64: the last row of every request that samples
    sampling: tuple[int, ...]  # which of the scheduled requests those are
    scores_prompts: bool = False  # some request asks for logprobs of its prompt, and computes tokens of it


def build_input_batch(scheduled: Sequence[ScheduledRequest], block_size: int, device: str) -> InputBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[QuerySpan] = []
    scores_prompts = False
    for item in scheduled:
        if item.request.sampling.prompt_logprobs is not None:
            scores_prompts |= item.start < item.request.num_prompt_tokens - 1
        stop = item.start + item.num_tokens
        blocks = item.request.blocks[: -(-stop // block_size)]
        block_ids = [block.block_id for block in blocks]
        assert len(block_ids) * block_size >= stop, "the blocks of a scheduled request cover its tokens"
        spans.append(QuerySpan(len(token_ids), item.num_tokens, item.start, block_ids))
        token_ids += tokens_between(item.request, item.start, stop)
        positions += range(item.start, stop)
        slots += slot_mapping(block_ids, item.start, stop, block_size)
    sampling = tuple(index for index, item in enumerate(scheduled) if item.samples)
    last_rows = [spans[index].row + spans[index].num_tokens - 1 for index in sampling]
    return InputBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        step=PagedStep(tuple(spans), torch.tensor(slots, dtype=torch.int64, device=device)),
        sample_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
        sampling=sampling,
        scores_prompts=scores_prompts,
    )


def tokens_between(request: Request, start: int, stop: int) -> list[int]:
    """Tokens [start, stop) of prompt and output, without joining the two."""
    num_prompt = request.num_prompt_tokens
    if start >= num_prompt:
        return request.output_token_ids[start - num_prompt : stop - num_prompt]
    prompt = request.prompt_token_ids[start:stop]
    return prompt + request.output_token_ids[: stop - num_prompt] if stop > num_prompt else prompt


def slot_mapping(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Cache slot of each token in [start, stop)."""
    return [block_ids[i // block_size] * block_size + i % block_size for i in range(start, stop)]
