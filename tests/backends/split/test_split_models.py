"""Split answers token for token as merged does, and both as `transformers.generate`, with real tiny models."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from typing_extensions import override

from backends.config import EngineConfig
from backends.core.request import Request
from backends.engines.base import Engine, PeerId
from backends.engines.build import build_merged
from backends.engines.split.build import build_decode, build_prefill
from backends.models.spec import ModelLoadError
from backends.protocol.messages import (
    CacheParams,
    Done,
    Failed,
    FromEngine,
    FromPrefill,
    SamplingParams,
    TokenChunk,
    ToPrefill,
)
from support.generated_tokens import generate
from support.tiny_model import make_tokenizer

torch.set_num_threads(1)

PEER = PeerId("the-other-side", 1)
NUM_TOKENS = 12
LENGTHS = (1, 15, 16, 17, 40)
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Mistral": {"sliding_window": 9},
    "Gemma": {"head_dim": 16},
}


class Answers:
    """One engine, and what it said."""

    def __init__(self) -> None:
        self.emitted: list[FromEngine] = []
        self.engine: Engine
        self._count = 0

    def ask(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY, cache: CacheParams | None = None
    ) -> list[list[int]]:
        """All prompts at once; their answers once all are there."""
        names = [self.submit(prompt, sampling, cache, seed=seed) for seed, prompt in enumerate(prompts)]
        self.run()
        return [self.tokens(name) for name in names]

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, cache: CacheParams | None = None, *, seed: int = 0
    ) -> str:
        self._count += 1
        request = Request(
            request_id=f"r{self._count}",
            prompt_token_ids=list(prompt),
            max_tokens=sampling.max_tokens or NUM_TOKENS,
            eos_token_ids=frozenset({2}),
            sampling=sampling,
            cache=cache or CacheParams(),
            seed=seed,
            arrived_at=time.monotonic(),
        )
        self.engine.submit(request)
        return request.request_id

    def tokens(self, name: str) -> list[int]:
        assert not [event for event in self.emitted if isinstance(event, Failed)]
        chunks = [event for event in self.emitted if isinstance(event, TokenChunk) and event.request_id == name]
        return [token for chunk in chunks for token in chunk.token_ids]

    def last_done(self) -> Done:
        return [event for event in self.emitted if isinstance(event, Done)][-1]

    def run(self) -> None:
        while self.engine.num_unfinished():
            assert self.engine.step()

    def close(self) -> None:
        self.engine.close()


class Merged(Answers):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.engine = build_merged(config, self.emitted.append).engine


class Split(Answers):
    """Both sides in this thread; copies run in their pool."""

    def __init__(self, config: EngineConfig, *, decode: EngineConfig | None = None) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._to_prefill: deque[ToPrefill] = deque()
        self._from_prefill: deque[FromPrefill] = deque()
        self.decode = build_decode(as_role(decode or config, "decode"), self.emitted.append).engine
        self.prefill = build_prefill(as_role(config, "prefill"), self._woken.set).engine
        self.engine = self.decode
        pair, fd = self.decode.pair_message(), self.decode.kv_memory_fd
        assert self.prefill.pair(PEER, pair, fd, self._from_prefill.append) is None
        self.decode.peer_connected(PEER, self, self.prefill.info)

    def send(self, message: ToPrefill) -> None:
        self._to_prefill.append(message)

    def turn(self) -> bool:
        progressed = bool(self._to_prefill or self._from_prefill)
        while self._to_prefill:
            self.prefill.peer_message(PEER, self._to_prefill.popleft())
        progressed |= self.prefill.step()
        while self._from_prefill:
            self.decode.peer_message(PEER, self._from_prefill.popleft())
        return progressed | self.decode.step()

    @override
    def run(self) -> None:
        while self.decode.num_unfinished() or self.prefill.num_unfinished():
            self._woken.clear()
            if not self.turn() and not (self._to_prefill or self._from_prefill):
                assert self._woken.wait(20)
        assert self.decode.stats().num_blocks_in_use == self.prefill.stats().num_blocks_in_use == 0

    @override
    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def as_role(config: EngineConfig, role: Any) -> EngineConfig:
    return msgspec.structs.replace(config, role=role)


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "role": "merged",
        "model": str(folder),
        "dtype": "fp32",
        "num_kv_blocks": 48,
        "num_threads": 1,
        "compiled_rows": 8,
        "handoff_timeout_seconds": 60.0,
    }
    return EngineConfig(**(values | changes))


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


def make_folder(folder: Path, family: str, *, key_bias: float = 0.0) -> int:
    vocab_size = make_tokenizer(folder)
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | {"vocab_size": vocab_size}))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.data.add_(torch.randn_like(parameter) * key_bias)
    model.save_pretrained(folder)
    return vocab_size


class Case:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        self.prompts = make_prompts(make_folder(folder, family))
        self.expected = generate(folder, self.prompts, NUM_TOKENS)


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("Llama"), "Llama")


@pytest.fixture
def opened() -> Iterator[Callable[[Answers], Any]]:
    """Closes what a test opened."""
    known: list[Answers] = []

    def remember(answers: Answers) -> Answers:
        known.append(answers)
        return answers

    yield remember
    for answers in known:
        answers.close()


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("mode", ["layer", "request"])
def test_every_family_answers_as_transformers_does(
    case: Case, mode: str, chunk: int, opened: Callable[[Answers], Any]
) -> None:
    split = opened(Split(make_config(case.folder, transfer_mode=mode, prefill_chunk_tokens=chunk)))

    assert split.ask(case.prompts) == case.expected
    hits_before = split.prefill.stats().prefix_hit_tokens
    assert split.ask(case.prompts) == case.expected  # once more, now with prefix hits
    assert split.prefill.stats().prefix_hit_tokens - hits_before == 16 + 32
    merged = opened(Merged(make_config(case.folder, prefill_chunk_tokens=chunk)))
    assert merged.ask(case.prompts) == case.expected


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 39, 40])
@pytest.mark.parametrize("block_size", [4, 16])
def test_every_chunk_size_gives_the_same_tokens(
    llama: Case, chunk: int, block_size: int, opened: Callable[[Answers], Any]
) -> None:
    config = make_config(llama.folder, prefill_chunk_tokens=chunk, block_size=block_size, max_num_seqs=3)

    assert opened(Split(config)).ask(llama.prompts) == llama.expected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, top_p=0.9, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.01, logit_bias={5: 2.0}),
        SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, min_tokens=6, logit_bias={2: 30.0}),
    ],
)
def test_sampling_is_the_same_in_both_layouts(
    llama: Case, sampling: SamplingParams, opened: Callable[[Answers], Any]
) -> None:
    split, merged = opened(Split(make_config(llama.folder))), opened(Merged(make_config(llama.folder)))

    answers = split.ask(llama.prompts, sampling)

    assert answers == merged.ask(llama.prompts, sampling)
    assert answers != llama.expected
    if sampling.min_tokens:
        assert [len(answer) for answer in answers] == [7] * len(LENGTHS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("mode", ["layer", "request"])
def test_low_precision_kv_arrives_bit_for_bit(
    llama: Case, dtype: str, mode: str, opened: Callable[[Answers], Any]
) -> None:
    config = make_config(llama.folder, kv_cache_dtype=dtype, transfer_mode=mode, prefill_chunk_tokens=13)
    split, merged = opened(Split(config)), opened(Merged(config))
    answers = merged.ask(llama.prompts)

    assert split.ask(llama.prompts) == answers
    assert split.last_done().timings.transfer_bytes == LENGTHS[-1] * split.decode.info.kv_bytes_per_token
    assert split.ask(llama.prompts) == answers  # once more, now with prefix hits
    assert split.prefill.stats().prefix_hit_tokens == 16 + 32
    assert merged.ask(llama.prompts) == answers


@pytest.mark.parametrize("mode", ["layer", "request"])
def test_int8_kv_of_keys_with_large_biases_is_the_same_in_both_layouts(
    tmp_path: Path, mode: str, opened: Callable[[Answers], Any]
) -> None:
    """Qwen2 has them, and they make a few elements of a key many times the others."""
    prompts = make_prompts(make_folder(tmp_path, "Qwen2", key_bias=20.0))
    config = make_config(tmp_path, kv_cache_dtype="int8", transfer_mode=mode)

    answers = opened(Merged(config)).ask(prompts)

    assert opened(Split(config)).ask(prompts) == answers
    assert len({tuple(answer) for answer in answers}) == len(prompts)


def test_both_sides_find_the_same_kv_dtype_where_only_one_pool_is_limited(
    llama: Case, opened: Callable[[Answers], Any]
) -> None:
    """A limit that the decode side alone has decides for both, or they couldn't be paired."""
    gib = 200 * 2 * 3 * 2 * 16 * 4 / 2**30  # 200 tokens of a context of 256
    config = make_config(llama.folder, num_kv_blocks=None, auto_kv_dtype_gib=gib)

    split = opened(Split(config, decode=msgspec.structs.replace(config, kv_cache_gib=gib)))

    assert split.prefill.info.kv_cache_dtype == split.decode.info.kv_cache_dtype == "int8"
    assert split.decode.info.num_blocks < split.prefill.info.num_blocks
    for info in (split.prefill.info, split.decode.info):
        assert any("int8 is used" in notice and "200 tokens" in notice for notice in info.notices)
    assert opened(Merged(make_config(llama.folder, kv_cache_dtype="int8"))).ask(llama.prompts) == split.ask(
        llama.prompts
    )


def test_preemption_on_the_decode_side_changes_no_token(llama: Case, opened: Callable[[Answers], Any]) -> None:
    config = make_config(llama.folder, num_kv_blocks=27, block_size=4)
    split = opened(Split(config))

    assert split.ask(llama.prompts) == llama.expected
    assert split.decode.stats().num_preemptions > 0


def test_one_client_gone_in_the_middle_disturbs_no_other(llama: Case, opened: Callable[[Answers], Any]) -> None:
    split = opened(Split(make_config(llama.folder, prefill_chunk_tokens=8)))
    names = [split.submit(prompt, GREEDY) for prompt in llama.prompts]
    while not split.tokens(names[3]):
        split.turn()
    split.decode.abort(names[3])
    split.decode.abort(names[4])  # at this time its prompt is being computed
    split.run()

    assert [split.tokens(name) for name in names[:3]] == llama.expected[:3]
    assert split.ask(llama.prompts) == llama.expected


def test_a_decode_side_of_another_model_is_refused(
    llama: Case, tmp_path: Path, opened: Callable[[Answers], Any]
) -> None:
    make_folder(tmp_path, "Qwen2")
    split = opened(Split(make_config(llama.folder)))
    other = build_decode(make_config(tmp_path, role="decode"), lambda _: None).engine

    refusal = split.prefill.pair(PeerId("other", 2), other.pair_message(), other.kv_memory_fd, lambda _: None)

    assert refusal is not None
    assert "differ in model" in refusal
    other.close()


def test_split_runs_on_the_cpu_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not move KV of device 'cuda:0'"):
        build_decode(make_config(tmp_path, role="decode", device="cuda:0"), lambda _: None)
