"""A merged engine of real parts around a tiny random model: token for token what `transformers.generate` says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_doubles import make_request

from backends.config import EngineConfig
from backends.engines.build import BuiltMerged, build_merged
from backends.protocol.messages import Done, FromEngine, SamplingParams, TokenChunk
from support.generated_tokens import generate
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


def build(folder: Path, emitted: list[FromEngine], **kwargs: Any) -> BuiltMerged:
    config = EngineConfig(
        role="merged",
        model=str(folder),
        dtype="fp32",
        weight_dtype="fp32",
        num_threads=1,
        compiled_rows=8,
        **{"num_kv_blocks": 64, "block_size": 4, **kwargs},
    )
    return build_merged(config, emitted.append)


def answers(built: BuiltMerged, emitted: list[FromEngine], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        built.engine.submit(make_request(str(number), prompt, max_tokens=NUM_TOKENS, sampling=GREEDY))
    while built.engine.step():
        pass
    chunks = [item for item in emitted if isinstance(item, TokenChunk)]
    return [
        [token_id for chunk in chunks if chunk.request_id == str(number) for token_id in chunk.token_ids]
        for number in range(len(prompts))
    ]


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(3, 300) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_any_chunk_size_and_batch_mix_answers_as_transformers_does(folder, chunk):
    emitted: list[FromEngine] = []
    prompts = random_prompts(1, 4, 17, 30)
    built = build(folder, emitted, prefill_chunk_tokens=chunk, prefill_token_ratio=0.5, max_batched_tokens=32)
    assert answers(built, emitted, prompts) == generate(folder, prompts, NUM_TOKENS)


def test_preempted_requests_answer_as_transformers_does(folder):
    emitted: list[FromEngine] = []
    prompts = random_prompts(9, 12, 10, 11)
    built = build(folder, emitted, num_kv_blocks=14)
    assert answers(built, emitted, prompts) == generate(folder, prompts, NUM_TOKENS)
    assert built.engine.stats().num_preemptions > 0
    assert built.engine.stats().num_blocks_in_use == 0


def test_prefix_hits_answer_as_transformers_does(folder):
    (prompt,) = random_prompts(32)
    (expected,) = generate(folder, [prompt], NUM_TOKENS)
    emitted: list[FromEngine] = []
    built = build(folder, emitted)
    assert answers(built, emitted, [prompt]) == [expected]
    emitted.clear()
    longer = prompt + expected[:9]
    assert answers(built, emitted, [longer]) == generate(folder, [longer], NUM_TOKENS)
    (done,) = [item for item in emitted if isinstance(item, Done)]
    assert done.usage.cached_tokens == 40


def test_text_is_that_of_the_tokens(folder):
    emitted: list[FromEngine] = []
    built = build(folder, emitted)
    (tokens,) = answers(built, emitted, random_prompts(8))
    texts = [item.text for item in emitted if isinstance(item, TokenChunk | Done)]
    detokenizer = built.codec.detokenizer()
    assert "".join(texts) == "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert "".join(texts)


def test_a_pool_smaller_than_the_context_limits_the_length_and_says_so(folder):
    built = build(folder, [], num_kv_blocks=8)
    assert built.info.max_model_len == 32
    assert any("KV pool holds 32 tokens" in notice for notice in built.info.notices)
    assert build(folder, []).info.max_model_len == 256
    large = build(folder, [], num_kv_blocks=200).info
    assert large.max_model_len == 512
    assert not any("KV pool" in notice for notice in large.notices)


def test_info_and_stats_tell_of_the_real_parts(folder):
    built = build(folder, [])
    info = built.info
    assert (info.role, info.device, info.kv_cache_dtype, info.weight_dtype) == ("merged", "cpu", "fp32", "fp32")
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (info.num_blocks, info.block_size, info.num_threads) == (64, 4, 1)
    stats = built.engine.stats()
    assert stats.num_blocks == 64
    assert stats.peak_memory_bytes >= stats.memory_bytes * 0.9
    assert stats.memory_bytes > 10 * 2**20
