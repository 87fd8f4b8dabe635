"""Greedy output in fp32 is that of transformers.generate, whatever the chunk size, batch mix and state of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import DENSE, THROUGH_TRANSFORMERS, Driver, make_folder, make_prompts

from backends.models.base import LoadedModel
from backends.models.dense import DenseModel
from backends.models.hf import HFModel
from backends.models.loader import load_model
from support.generated_tokens import generate

BLOCK = 16
NUM_TOKENS = 20
LENGTHS = (1, 15, 16, 17, 41)
Case = tuple[LoadedModel, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module", params=[*DENSE, *THROUGH_TRANSFORMERS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name: str = request.param
    family, extra = (DENSE | THROUGH_TRANSFORMERS)[name]
    folder = make_folder(tmp_path_factory.mktemp(name), family, extra)
    prompts = make_prompts(*LENGTHS)
    loaded = load_model(folder, dtype="fp32")
    assert isinstance(loaded.model, DenseModel if name in DENSE else HFModel)
    return loaded, prompts, generate(folder, prompts, NUM_TOKENS)


def test_expected_outputs_are_worth_comparing(case: Case) -> None:
    _, _, expected = case
    assert all(len(answer) == NUM_TOKENS for answer in expected)
    assert sum(len(set(answer)) > 4 for answer in expected) >= 3
    assert len({tuple(answer) for answer in expected}) == len(expected)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, LENGTHS[-1] - 1, LENGTHS[-1]])
def test_every_chunk_size_gives_the_same_tokens(case: Case, chunk: int) -> None:
    loaded, prompts, expected = case
    driver = Driver(loaded, block_size=BLOCK)
    assert driver.run(prompts[-1:], NUM_TOKENS, chunk=chunk) == expected[-1:]


def test_each_prompt_alone_gives_the_same_tokens(case: Case) -> None:
    loaded, prompts, expected = case
    driver = Driver(loaded, block_size=BLOCK)
    assert [driver.run([prompt], NUM_TOKENS, chunk=64)[0] for prompt in prompts] == expected


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_all_prompts_in_one_batch_give_the_same_tokens(case: Case, chunk: int) -> None:
    loaded, prompts, expected = case
    assert Driver(loaded, block_size=BLOCK).run(prompts, NUM_TOKENS, chunk=chunk) == expected


def test_requests_joining_at_different_steps_don_t_change_one_another(case: Case) -> None:
    loaded, prompts, expected = case
    driver = Driver(loaded, block_size=4, num_blocks=128)
    assert driver.run(prompts, NUM_TOKENS, chunk=7, starts=[9, 0, 4, 2, 1]) == expected


def test_blocks_in_a_row_and_reused_blocks_give_the_same_tokens(case: Case) -> None:
    loaded, prompts, expected = case
    driver = Driver(loaded, block_size=BLOCK, num_blocks=24, in_order=True)
    for _ in range(2):
        assert driver.run(prompts, NUM_TOKENS, chunk=11) == expected


def test_bf16_runs_and_stays_finite(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Llama", {}, dtype=torch.bfloat16)
    loaded = load_model(folder, dtype="bf16")
    driver = Driver(loaded)
    assert driver.cache.tensor.dtype == torch.bfloat16
    prompts = make_prompts(33)
    first = driver.run(prompts, 8, chunk=64)
    assert driver.run(prompts, 8, chunk=64) == first
