"""What a step calls, in which order, and whom it samples for. The model is scripted."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.attention.base import AttentionParams
from backends.attention.paged import PagedAttention
from backends.core.block_pool import KVCacheBlock
from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest
from backends.models.base import LoadedModel
from backends.models.spec import ModelSpec
from backends.protocol.messages import CacheParams, SamplingParams
from backends.worker.kv_cache import PagedKVCache
from backends.worker.model_runner import ModelRunner

torch.set_num_threads(1)
SPEC = ModelSpec(
    num_layers=3,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=50,
    max_model_len=64,
    dtype="fp32",
    weight_dtype="fp32",
    fingerprint="f",
)


class NextNumber:
    """Says that each token is followed by the next number, and writes the token into the cache."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def forward(self, token_ids: Tensor, positions: Tensor, attention: PagedAttention, rows: Tensor) -> Tensor:
        self.calls.append((token_ids.tolist(), positions.tolist()))
        heads = token_ids.float().view(-1, 1, 1).expand(-1, 1, 4)
        for layer in range(attention.num_layers):
            assert attention(layer, heads, heads, heads, AttentionParams(1.0)).shape == heads.shape
        return torch.nn.functional.one_hot(token_ids[rows] + 1, SPEC.vocab_size).float()


def make_runner() -> tuple[ModelRunner, NextNumber]:
    model = NextNumber()
    return ModelRunner(LoadedModel(model, SPEC), PagedKVCache.allocate(SPEC, 8, 4)), model


def make_request(prompt: list[int], block_ids: list[int]) -> Request:
    request = Request("r", prompt, 10, frozenset(), SamplingParams(temperature=0), CacheParams(), 0, 0.0)
    request.blocks += [KVCacheBlock(block_id) for block_id in block_ids]
    return request


def test_only_requests_that_are_caught_up_sample() -> None:
    runner, model = make_runner()
    first, second = make_request([3, 4, 5], [6]), make_request([7, 8], [1])
    assert runner.execute([ScheduledRequest(first, 0, 2), ScheduledRequest(second, 0, 2)]) == [None, 9]
    assert model.calls == [([3, 4, 7, 8], [0, 1, 0, 1])]
    second.output_token_ids.append(9)
    assert runner.execute([ScheduledRequest(first, 2, 1), ScheduledRequest(second, 2, 1)]) == [6, 10]
    assert runner.execute([]) == []


def test_kv_lies_in_the_requests_slots_and_nowhere_else() -> None:
    runner, _ = make_runner()
    runner.kv_cache.tensor.zero_()
    runner.execute([ScheduledRequest(make_request([3, 4, 5, 6, 7], [6, 2]), 0, 5)])
    first_dims = runner.kv_cache.tensor[2, 1, :, :, 0, 0]
    assert first_dims[6].tolist() == [3, 4, 5, 6]
    assert first_dims[2].tolist() == [7, 0, 0, 0]
    assert first_dims.count_nonzero() == 5


def test_each_layer_is_reported_once_when_its_kv_is_there() -> None:
    runner, _ = make_runner()
    runner.kv_cache.tensor.zero_()
    seen: list[tuple[int, list[int]]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, runner.kv_cache.tensor[:, 0, 5, 1, 0, 0].int().tolist()))

    runner.execute([ScheduledRequest(make_request([3, 4], [5]), 0, 2)], on_layer=on_layer)
    assert seen == [(0, [4, 0, 0]), (1, [4, 4, 0]), (2, [4, 4, 4])]
