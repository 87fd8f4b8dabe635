"""The compiled decode step says what transformers and the torch path say, for every family and form of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_helpers import DENSE, SIZES, Driver, make_folder, make_prompts, make_request

from backends.models.base import LoadedModel
from backends.models.loader import load_model
from backends.models.native_step import MAX_STEP_ROWS, StepUnavailable, make_native_step
from backends.native import library
from backends.protocol.messages import SamplingParams
from backends.worker.kv_cache import PagedKVCache
from support.generated_tokens import generate

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")

NUM_TOKENS = 20
LENGTHS = (1, 15, 16, 17, 41)


@pytest.fixture(scope="module", params=[*DENSE])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family, extra = DENSE[request.param]
    folder = make_folder(tmp_path_factory.mktemp(request.param), family, extra)
    prompts = make_prompts(*LENGTHS)
    return load_model(folder, dtype="fp32"), prompts, generate(folder, prompts, NUM_TOKENS)


def test_each_prompt_alone_gives_the_tokens_of_transformers(case: tuple[LoadedModel, list, list]):
    loaded, prompts, expected = case
    driver = Driver(loaded, compiled=True)

    assert [driver.run([prompt], NUM_TOKENS, chunk=64)[0] for prompt in prompts] == expected


def test_a_batch_whose_requests_join_one_by_one_gives_the_tokens_of_transformers(case: tuple[LoadedModel, list, list]):
    loaded, prompts, expected = case
    driver = Driver(loaded, block_size=4, num_blocks=128, compiled=True)

    assert driver.run(prompts, NUM_TOKENS, chunk=7, starts=[9, 0, 4, 2, 1]) == expected


def test_more_rows_than_the_kernel_takes_at_once_are_done_in_parts(tmp_path: Path):
    folder = make_folder(tmp_path, "Qwen3", {"head_dim": 32})
    prompts = make_prompts(*range(2, 2 + MAX_STEP_ROWS + 3))
    loaded = load_model(folder, dtype="fp32")

    compiled = Driver(loaded, num_blocks=256, compiled=True).run(prompts, 6, chunk=64)
    assert compiled == Driver(loaded, num_blocks=256).run(prompts, 6, chunk=64)


@pytest.mark.parametrize("weight_dtype", ["bf16", "int8", "int4", "fp32"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32", "fp16", "int8"])
def test_every_form_of_weights_gives_logits_close_to_the_torch_path(tmp_path: Path, weight_dtype: str, kv_dtype: str):
    folder = make_folder(tmp_path, "Llama", {"attention_bias": True, "initializer_range": 0.1}, dtype=torch.bfloat16)
    loaded = load_model(folder, dtype="bf16", weight_dtype=weight_dtype)
    [by_torch, by_kernel] = [logits_after_prompt(loaded, kv_dtype, compiled=compiled) for compiled in (False, True)]

    spread = float(by_torch.std())
    assert spread > 0.1
    assert float((by_torch - by_kernel).abs().max()) < 0.08 * spread  # bf16 has 8 bits of mantissa
    assert float((by_torch - by_kernel).abs().mean()) < 0.02 * spread


def logits_after_prompt(loaded: LoadedModel, kv_dtype: str, *, compiled: bool) -> torch.Tensor:
    """Logits of two requests' second token, given the same first one."""
    seen: list[torch.Tensor] = []
    driver = Driver(loaded, compiled=compiled, kv_dtype=kv_dtype)
    original = driver.runner._logits

    def keep(*arguments: object) -> torch.Tensor:
        logits = original(*arguments)  # type: ignore[arg-type]
        seen.append(logits.float())
        return logits

    driver.runner._logits = keep  # type: ignore[method-assign]
    requests = [
        make_request(prompt, SamplingParams(temperature=0), str(i)) for i, prompt in enumerate(make_prompts(30, 9))
    ]
    driver.step([driver.schedule(request, request.num_pending_tokens) for request in requests])
    for request in requests:
        request.output_token_ids[:] = [11]
    driver.step([driver.schedule(request, 1) for request in requests])
    return seen[-1]


@pytest.mark.parametrize("extra", [{"vocab_size": 90}, {"hidden_size": 48, "head_dim": 16}, {"intermediate_size": 100}])
def test_sizes_that_the_kernels_do_not_take_are_said(tmp_path: Path, extra: dict[str, int]):
    loaded = load_model(make_folder(tmp_path, "Llama", SIZES | extra), dtype="fp32")
    cache = PagedKVCache.allocate(loaded.spec, 4, 16)

    with pytest.raises(StepUnavailable, match="multiple of"):
        make_native_step(loaded, cache.tensor)
