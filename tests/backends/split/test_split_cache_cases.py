"""What a KV cache must never change, with real tiny models in both layouts: hits, chunks, small pools, memory.

All memory that nobody has written holds NaN here, in the KV pools and in what `torch.empty` gives.
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from test_split_models import GREEDY, NUM_TOKENS, Answers, Merged, Split, make_config, make_folder

from backends.config import EngineConfig
from backends.core.request import Request
from backends.protocol.messages import CacheParams, Done, SamplingParams, TokenChunk
from support.generated_tokens import generate

torch.set_num_threads(1)

BLOCK = 16
SCORED = SamplingParams(temperature=0, ignore_eos=True, logprobs=20)
ALONE = CacheParams(enable_prefix_cache=False)
MOST_DIFFERENCE = 1e-4
LAYOUTS: dict[str, Callable[[EngineConfig], Answers]] = {"merged": Merged, "split": Split}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def torch_empty_gives_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=["Llama", "Mistral"])  # grouped heads; and a window of 9 tokens beside
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("Llama")
    make_folder(folder, "Llama")
    return folder


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Makes engines whose pools hold NaN, and closes them."""
    known: list[Answers] = []

    def make(layout: str, folder: Path, **changes: Any) -> Answers:
        answers = LAYOUTS[layout](make_config(folder, **changes))
        known.append(answers)
        for pool in pools_of(answers):
            pool.view(torch.uint8).fill_(255)  # NaN in every float type, and as the scale of an int8 row
        return answers

    yield make
    for answers in known:
        answers.close()


def engines_of(answers: Answers) -> list[Any]:
    return [answers.decode, answers.prefill] if isinstance(answers, Split) else [answers.engine]


def pools_of(answers: Answers) -> list[torch.Tensor]:
    return [engine._stepper._runner.kv_cache.tensor for engine in engines_of(answers)]


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 300) for _ in range(num_tokens)]


def scores(answers: Answers, prompt: Sequence[int], cache: CacheParams | None = None) -> tuple[list[int], list[float]]:
    """The answer, and at each of its places the logprobs of the 20 likeliest tokens."""
    name = answers.submit(prompt, SCORED, cache)
    answers.run()
    chunks = [event for event in answers.emitted if isinstance(event, TokenChunk) and event.request_id == name]
    places = chain.from_iterable(chunk.logprobs or () for chunk in chunks)
    values = [top.logprob for place in places for top in place.top]
    assert len(values) == 20 * NUM_TOKENS
    return answers.tokens(name), [math.nan if value is None else value for value in values]


def same(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
    differences = [abs(a - b) for a, b in zip(one[1], other[1], strict=True)]
    return one[0] == other[0] and max(differences) < MOST_DIFFERENCE  # never true of a NaN


def cached_tokens(answers: Answers) -> int:
    return [event for event in answers.emitted if isinstance(event, Done)][-1].usage.cached_tokens


# ------------------------------------------------------------------------------------------------------ prefix hits


@by_layout
@pytest.mark.parametrize("chunk", [5, 16, 512])  # with 5, chunks after a hit begin and end inside blocks
def test_kv_04_a_hit_of_any_length_gives_the_logits_of_a_miss(
    family: Path, layout: str, chunk: int, opened: Callable[..., Any]
) -> None:
    """Prompts that share none to all of their blocks; one that is found whole; each twice, then after eviction."""
    reference = opened("merged", family, num_kv_blocks=24)
    answers = opened(layout, family, num_kv_blocks=24, prefill_chunk_tokens=chunk)
    first = random_prompt(1, 3 * BLOCK + 5)
    shared = [0, 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 7, 3 * BLOCK]
    prompts = [first, *(first[:length] + random_prompt(length + 2, 9) for length in shared), first[: 3 * BLOCK]]
    misses = [scores(reference, prompt, ALONE) for prompt in prompts]
    assert len({tuple(ids) for ids, _ in misses}) == len(prompts)

    hits = []
    for prompt, miss in zip(prompts, misses, strict=True):
        assert same(scores(answers, prompt), miss)
        hits.append(cached_tokens(answers))
        assert same(scores(answers, prompt), miss)
        assert cached_tokens(answers) == (len(prompt) - 1) // BLOCK * BLOCK
    assert hits == [0, *(length // BLOCK * BLOCK for length in shared), 2 * BLOCK]

    for seed in range(100, 112):  # their blocks push out all that was kept
        scores(answers, random_prompt(seed, 2 * BLOCK))
    for prompt, miss in zip(reversed(prompts), reversed(misses), strict=True):
        assert same(scores(answers, prompt), miss)


@by_layout
def test_kv_04_hits_in_blocks_that_others_hold_and_read_at_the_same_time(
    family: Path, layout: str, opened: Callable[..., Any]
) -> None:
    answers = opened(layout, family, num_kv_blocks=24, prefill_chunk_tokens=7)
    first = random_prompt(1, 2 * BLOCK)
    prompts = [first + random_prompt(seed, seed) for seed in range(2, 8)]
    answers.ask([first])

    assert answers.ask(prompts) == generate(family, prompts, NUM_TOKENS)
    assert sum(engine.stats().prefix_hit_tokens for engine in engines_of(answers)) == len(prompts) * 2 * BLOCK


# ----------------------------------------------------------------------------------------------------------- chunks


LONG = 3 * BLOCK - 3


@by_layout
@pytest.mark.parametrize("chunk", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, LONG - 1, LONG])
def test_kv_06_every_chunk_size_gives_the_same_tokens_beside_requests_that_decode(
    family: Path, layout: str, chunk: int, opened: Callable[..., Any]
) -> None:
    answers = opened(layout, family, prefill_chunk_tokens=chunk, num_kv_blocks=24)
    prompts = [random_prompt(seed, length) for seed, length in enumerate([4, LONG, BLOCK, 1, LONG])]
    names = []
    for prompt in prompts:  # each joins when those before it decode or are still computed
        names.append(answers.submit(prompt, GREEDY))
        turn(answers)
        turn(answers)
    answers.run()

    assert [answers.tokens(name) for name in names] == generate(family, prompts, NUM_TOKENS)


@by_layout
@pytest.mark.parametrize("dtypes", [{"dtype": "bf16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp16"}])
def test_kv_06_no_memory_that_was_never_written_is_read(
    llama: Path, layout: str, dtypes: dict[str, str], opened: Callable[..., Any]
) -> None:
    """Whatever it holds, the answers are the same."""
    found = []
    for byte in (255, 0):
        answers = opened(layout, llama, prefill_chunk_tokens=6, num_kv_blocks=24, block_size=8, **dtypes)
        for pool in pools_of(answers):
            pool.view(torch.uint8).fill_(byte)
        prompts = [random_prompt(seed, length) for seed, length in enumerate([4, LONG, BLOCK, 1, 9])]
        found.append(answers.ask(prompts))

    assert found[0] == found[1]
    assert len({tuple(answer) for answer in found[0]}) == len(found[0])


# ------------------------------------------------------------------------------------------------------ small pools


@by_layout
def test_kv_10_twenty_requests_in_a_pool_for_few_answer_as_in_a_large_one(
    llama: Path, layout: str, opened: Callable[..., Any]
) -> None:
    prompts = [random_prompt(seed, 9 + seed % 5) for seed in range(20)]
    large = opened(layout, llama, num_kv_blocks=200, block_size=4)
    small = opened(layout, llama, num_kv_blocks=16, block_size=4)

    assert small.ask(prompts) == large.ask(prompts)
    assert small.engine.stats().num_preemptions > 0
    assert large.engine.stats().num_preemptions == 0


NUM_CYCLES = 100
CYCLE_BYTES = 6 * BLOCK * 3 * 2 * 2 * 16 * 4  # the least KV that a cycle holds: six blocks of a tiny model
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@by_layout
def test_pd_06_what_is_preempted_and_aborted_a_hundred_times_leaves_nothing(
    llama: Path, layout: str, opened: Callable[..., Any]
) -> None:
    """A pool that is full, a request that gives way, and all clients gone: no block, no request, no copy of KV."""
    answers = opened(layout, llama, num_kv_blocks=8, max_num_seqs=4)
    for number in range(10):  # whatever is made once is made
        preempt_and_abort(answers, number)
    before = held(answers)

    for number in range(10, 10 + NUM_CYCLES):
        preempt_and_abort(answers, number)
        assert [engine.stats().num_blocks_in_use for engine in engines_of(answers)] == [0] * len(engines_of(answers))

    requests, tensor_bytes, resident_bytes = (now - then for now, then in zip(held(answers), before, strict=True))
    assert (requests, tensor_bytes) == (0, 0)
    assert resident_bytes < NUM_CYCLES * CYCLE_BYTES / 2
    prompts = [random_prompt(7, 40)]
    assert answers.ask(prompts) == generate(llama, prompts, NUM_TOKENS)


def preempt_and_abort(answers: Answers, number: int) -> None:
    """The newest first: the one that gave way is aborted while it waits, then those that took its room."""
    before = answers.engine.stats().num_preemptions
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=80)
    names = [answers.submit(random_prompt(1000 + 3 * number + i, 2 * BLOCK + 8), sampling) for i in range(3)]
    while answers.engine.stats().num_preemptions == before:
        turn(answers)
    for name in reversed(names):
        answers.engine.abort(name)
    answers.run()
    answers.emitted.clear()
    for engine in engines_of(answers):
        engine._scheduler.check_integrity()


def held(answers: Answers) -> tuple[int, int, int]:
    """Requests, bytes of tensors, and resident bytes of this process."""
    assert answers.engine.num_unfinished() == 0
    gc.collect()
    known = gc.get_objects()
    requests = sum(type(item) is Request for item in known)
    tensors = {item.untyped_storage().data_ptr(): item.nbytes for item in known if type(item) is torch.Tensor}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return requests, sum(tensors.values()), resident


def turn(answers: Answers) -> None:
    """Everything that can happen once; waits for copies that run."""
    if not isinstance(answers, Split):
        answers.engine.step()
        return
    answers._woken.clear()
    if not answers.turn() and not (answers._to_prefill or answers._from_prefill):
        assert answers._woken.wait(20)
