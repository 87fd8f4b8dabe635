"""Real engines of a random model beyond its own context, in both layouts: what transformers says, and what is told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from backends.core.errors import RequestRefused
from support.answering import MergedAnswers, SplitAnswers
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

OWN, ASKED, NUM_TOKENS = 64, 256, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=OWN)


@pytest.fixture(scope="module", params=[MergedAnswers, SplitAnswers])
def answers(request: pytest.FixtureRequest, folder: Path) -> MergedAnswers:
    return request.param(folder, max_model_len=ASKED)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(3, 200) for _ in range(length)]


def test_both_layouts_answer_as_transformers_with_the_same_scaling(folder, answers):
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    own = config.rope_parameters
    config.rope_parameters = own | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": OWN}
    config.max_position_embeddings = ASKED
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    for length in (10, 63, 200):
        prompt = prompt_of(length)
        ids = torch.tensor([prompt])
        output = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1, pad_token_id=0)
        for _ in range(2):  # the second finds the prefix
            answer = answers.ask(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer.tokens() == output[0, length:].tolist()
        assert answer.done.usage.cached_tokens >= length - 8


def test_the_extended_context_is_told(answers):
    info = answers.engine.info
    assert (info.max_model_len, info.native_max_model_len, info.rope_scaling) == (ASKED, OWN, "yarn, factor 4")
    assert any("RoPE scaling" in notice for notice in info.notices)
    assert (info.tool_format, info.reasoning_format) == ("hermes", "")


def test_cx_01_cx_02_the_end_of_the_context(answers):
    """What a client asks for beyond the room is clamped and told; a prompt that leaves no room is refused."""
    name = answers.submit(prompt_of(ASKED - 5), max_tokens=32_000, ignore_eos=True)
    assert answers.accepted(name).max_tokens == 5
    assert answers.accepted(name).notices == ("max_tokens 32000 exceeds the context; using 5",)
    answers.run()
    assert len(answers.answered(name).tokens()) == 5
    assert answers.answered(name).done.finish_reason == "length"
    assert len(answers.ask(prompt_of(ASKED - 1), max_tokens=9, ignore_eos=True).tokens()) == 1
    for length in (ASKED, ASKED + 1, 10 * ASKED):
        with pytest.raises(RequestRefused, match=f"maximum context length is {ASKED} tokens") as refused:
            answers.submit(prompt_of(length))
        assert refused.value.code == "context_length_exceeded"


def test_a_pool_that_holds_less_says_what_to_set(folder):
    info = MergedAnswers(folder, max_model_len=ASKED, num_kv_blocks=20).engine.info
    assert info.max_model_len == 80
    assert any("Raise kv_cache_gib or num_kv_blocks" in notice for notice in info.notices)
