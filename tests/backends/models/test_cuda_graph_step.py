"""Decode steps of fixed sizes, recorded and replayed by a double of CUDA graphs: the model's own logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_helpers import VOCAB_SIZE, Driver, make_folder, make_prompts
from torch import Tensor

from backends.attention.base import PagedStep, QuerySpan
from backends.attention.flashinfer import FlashInferAttention
from backends.attention.paged import PagedAttention
from backends.attention.reference import ReferenceAttention
from backends.engines.cuda_parts import Computing, cuda_computing
from backends.models.base import LoadedModel
from backends.models.cuda_graph_step import SIZES, CudaGraphStep, Graphs, make_cuda_graph_step
from backends.models.loader import load_model
from backends.models.native_step import DecodeRows, StepUnavailable
from backends.worker.kv_cache import PagedKVCache
from backends.worker.model_runner import ModelRunner
from support.flashinfer_double import FlashInferDouble

BLOCK, NUM_BLOCKS = 4, 256
FORM = {"head_dim": 64, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}


class RememberingGraphs(Graphs):
    """Captures by remembering the function and replays by calling it, into the same memory as a graph does."""

    def __init__(self, device: object = None) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = compute().clone()
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return output.copy_(compute())

        return replay


class RefusingGraphs(Graphs):
    def __init__(self, device: object = None) -> None:
        pass

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    # fp16: its eleven bits tell a wrong row from rounding
    folder = make_folder(tmp_path_factory.mktemp("qwen2"), "Qwen2", FORM, dtype=torch.float16)
    return load_model(folder, dtype="fp16")


def make_cache(loaded: LoadedModel) -> PagedKVCache:
    return PagedKVCache.allocate(loaded.spec, NUM_BLOCKS, BLOCK, "fp16")


def make_step(loaded: LoadedModel, kv: Tensor) -> tuple[CudaGraphStep, RememberingGraphs, FlashInferDouble]:
    package, graphs = FlashInferDouble(), RememberingGraphs()
    attention = FlashInferAttention(package, torch.zeros(64, dtype=torch.uint8))
    return make_cuda_graph_step(loaded, kv, attention, graphs), graphs, package


def make_rows(num_rows: int) -> tuple[DecodeRows, PagedStep]:
    randomness = random.Random(num_rows)
    ids = list(range(NUM_BLOCKS))
    randomness.shuffle(ids)
    positions = [randomness.randrange(0, 28) for _ in range(num_rows)]
    blocks = [[ids.pop() for _ in range(position // BLOCK + 1)] for position in positions]
    slots = torch.tensor([ids[-1] * BLOCK + at % BLOCK for ids, at in zip(blocks, positions, strict=True)])
    tokens = torch.tensor([randomness.randrange(VOCAB_SIZE) for _ in range(num_rows)])
    spans = tuple(QuerySpan(i, 1, positions[i], blocks[i]) for i in range(num_rows))
    return DecodeRows(tokens, torch.tensor(positions), slots, blocks), PagedStep(spans, slots)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 11, 31, 32])
def test_any_number_of_rows_gives_the_models_logits_and_writes_its_slots_alone(loaded: LoadedModel, num_rows: int):
    cache = make_cache(loaded).tensor
    step, graphs, _ = make_step(loaded, cache)
    torch.manual_seed(num_rows)
    cache.copy_(torch.randn(cache.shape))
    before = cache.clone()
    rows, paged = make_rows(num_rows)
    with torch.inference_mode():
        actual = step.logits(rows)
        other = before.clone()
        attention = PagedAttention(other, paged, ReferenceAttention())
        expected = loaded.model.forward(rows.token_ids, rows.positions, attention, torch.arange(num_rows))

    spread = float(expected.std())
    assert actual.shape == expected.shape
    assert spread > 0.1
    assert float((actual - expected).abs().max()) < 0.03 * spread
    torch.testing.assert_close(cache, other, rtol=1e-2, atol=0.1)  # the same keys and values in the same slots
    untouched = torch.ones(NUM_BLOCKS * BLOCK, dtype=torch.bool)
    untouched[rows.slots] = False
    assert torch.equal(cache.flatten(2, 3)[:, :, untouched], before.flatten(2, 3)[:, :, untouched])
    assert graphs.replayed == 1


def test_a_later_step_leaves_logits_given_before_as_they_were(loaded: LoadedModel):
    cache = make_cache(loaded).tensor
    step, _, _ = make_step(loaded, cache)
    torch.manual_seed(0)
    cache.copy_(torch.randn(cache.shape))
    first = step.logits(make_rows(3)[0])
    kept = first.clone()
    step.logits(make_rows(4)[0])
    assert torch.equal(first, kept)


def test_a_step_is_planned_once_for_each_window_and_recorded_once_for_each_size(loaded: LoadedModel):
    cache = make_cache(loaded).tensor
    step, graphs, package = make_step(loaded, cache)
    assert (step.max_rows, graphs.captured) == (SIZES[-1], len(SIZES))
    cache.zero_()
    package.plans.clear()
    for num_rows in (3, 3, 9):
        step.logits(make_rows(num_rows)[0])
    assert package.plans == ["decode"] * 2 * 3  # two kinds of layers
    assert (graphs.captured, graphs.replayed) == (len(SIZES), 3)


def test_requests_that_join_and_leave_get_the_tokens_of_torch(loaded: LoadedModel):
    prompts = make_prompts(3, 17, 8, 30, 5)
    plain = Driver(loaded, block_size=BLOCK, num_blocks=128)
    expected = plain.run(prompts, 12, chunk=7, starts=[9, 0, 4, 2, 1])

    driver = Driver(loaded, block_size=BLOCK, num_blocks=128)
    parts = parts_of(loaded, driver.cache.tensor)
    driver.cache.tensor.view(torch.uint8).fill_(255)  # trying them out has written
    driver.runner = ModelRunner(loaded, driver.cache, parts.attention, parts.step)
    actual = driver.run(prompts, 12, chunk=7, starts=[9, 0, 4, 2, 1])
    # a near tie may round the other way in fp16, and changes what follows; a wrong row would change nearly everything
    same = [a == b for one, other in zip(actual, expected, strict=True) for a, b in zip(one, other, strict=True)]
    assert sum(same) > 0.8 * len(same)
    assert parts.notices == ()


def parts_of(loaded: LoadedModel, kv: Tensor, graphs: type[Graphs] = RememberingGraphs) -> Computing:
    return cuda_computing(loaded, kv, "merged", load=FlashInferDouble, make_graphs=graphs)


def test_a_prefill_side_records_no_graphs(loaded: LoadedModel):
    kv = make_cache(loaded).tensor
    parts = cuda_computing(loaded, kv, "prefill", load=FlashInferDouble, make_graphs=RefusingGraphs)
    assert isinstance(parts.attention, FlashInferAttention)
    assert (parts.step, parts.notices) == (None, ())


def test_without_the_package_torch_computes_and_a_notice_names_the_extra(loaded: LoadedModel):
    parts = cuda_computing(loaded, make_cache(loaded).tensor, "merged", make_graphs=RefusingGraphs)
    assert isinstance(parts.attention, ReferenceAttention)
    assert parts.step is None
    [notice] = parts.notices
    assert "computed by torch" in notice
    assert "pip install 'kvgate[cuda]'" in notice


def test_a_cache_that_flashinfer_does_not_take_is_named_in_a_notice(loaded: LoadedModel):
    cache = PagedKVCache.allocate(loaded.spec, 8, BLOCK, "int8")
    parts = parts_of(loaded, cache.tensor)
    assert isinstance(parts.attention, ReferenceAttention)
    assert ["FlashInfer takes no int8 KV cache" in notice for notice in parts.notices] == [True]


def test_a_package_that_fails_when_tried_is_not_used(loaded: LoadedModel):
    class Failing(FlashInferDouble):
        def BatchDecodeWithPagedKVCacheWrapper(self, *args: object, **kwargs: object):
            raise RuntimeError("nvcc not found")

    parts = cuda_computing(loaded, make_cache(loaded).tensor, "merged", load=Failing, make_graphs=RememberingGraphs)
    assert isinstance(parts.attention, ReferenceAttention)
    assert ["nvcc not found" in notice for notice in parts.notices] == [True]


def test_a_recording_that_fails_leaves_flashinfer_and_a_notice(loaded: LoadedModel):
    parts = parts_of(loaded, make_cache(loaded).tensor, RefusingGraphs)
    assert isinstance(parts.attention, FlashInferAttention)
    assert parts.step is None
    assert ["stream is capturing" in notice for notice in parts.notices] == [True]


def test_a_model_through_transformers_is_not_recorded(tmp_path: Path):
    loaded = load_model(make_folder(tmp_path, "Gemma", {"head_dim": 64}, dtype=torch.float16), dtype="fp16")
    kv = make_cache(loaded).tensor
    with pytest.raises(StepUnavailable, match="own decoder"):
        make_step(loaded, kv)
    parts = parts_of(loaded, kv)
    assert isinstance(parts.attention, FlashInferAttention)
    assert ["own decoder" in notice for notice in parts.notices] == [True]
