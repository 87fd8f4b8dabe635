"""Which rows, positions and slots a step has."""

from __future__ import annotations

import pytest
import torch

from backends.core.block_pool import KVCacheBlock
from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest
from backends.protocol.messages import CacheParams, SamplingParams
from backends.worker.input_batch import build_input_batch, tokens_between


def make_request(prompt: list[int], output: list[int], block_ids: list[int]) -> Request:
    request = Request("r", prompt, 10, frozenset(), SamplingParams(), CacheParams(), 0, 0.0)
    request.output_token_ids += output
    request.blocks += [KVCacheBlock(block_id) for block_id in block_ids]
    return request


def test_rows_of_all_requests_lie_one_after_the_other() -> None:
    chunk = make_request([10, 11, 12, 13, 14, 15, 16], [], [7, 2])
    decode = make_request([20, 21], [22], [5])
    batch = build_input_batch([ScheduledRequest(chunk, 2, 4), ScheduledRequest(decode, 2, 1)], 4, "cpu")
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 22]
    assert batch.positions.tolist() == [2, 3, 4, 5, 2]
    assert batch.step.slot_mapping.tolist() == [30, 31, 8, 9, 22]
    assert [(span.row, span.num_tokens, span.start, list(span.block_ids)) for span in batch.step.spans] == [
        (0, 4, 2, [7, 2]),
        (4, 1, 2, [5]),
    ]
    assert batch.sampling == (1,)
    assert batch.sample_rows.tolist() == [4]


def test_the_last_chunk_samples_from_its_last_row() -> None:
    request = make_request([10, 11, 12], [], [0])
    batch = build_input_batch([ScheduledRequest(request, 1, 2)], 4, "cpu")
    assert batch.sampling == (0,)
    assert batch.sample_rows.tolist() == [1]
    assert batch.sample_rows.dtype == torch.int64


def test_blocks_beyond_the_step_are_left_out() -> None:
    request = make_request(list(range(9)), [], [3, 1, 8])
    batch = build_input_batch([ScheduledRequest(request, 0, 4)], 4, "cpu")
    assert list(batch.step.spans[0].block_ids) == [3]


@pytest.mark.parametrize(
    ("start", "stop", "expected"), [(0, 2, [1, 2]), (1, 5, [2, 3, 4, 5]), (3, 5, [4, 5]), (4, 5, [5]), (2, 3, [3])]
)
def test_tokens_run_from_prompt_into_output(start: int, stop: int, expected: list[int]) -> None:
    assert tokens_between(make_request([1, 2, 3], [4, 5], []), start, stop) == expected
