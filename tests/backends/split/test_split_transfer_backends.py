"""Split answers as merged does whatever moves the KV: every transfer backend, mode, chunk and KV data type of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engines.split.build import build_decode, build_prefill
from backends.kv_transfer.registry import available
from backends.models.spec import ModelLoadError
from support.answering import PEER, MergedAnswers, SplitAnswers, make_config
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

BACKENDS = [
    "local",
    pytest.param("nixl", marks=pytest.mark.skipif(available("nixl") is not None, reason=str(available("nixl")))),
]
PROMPTS = [[(start + step) % 90 + 5 for step in range(length)] for start, length in enumerate((1, 15, 16, 17, 40))]
Answers = MergedAnswers | SplitAnswers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_llama(path)
    return path


@pytest.fixture
def opened() -> Iterator[Callable[[SplitAnswers], SplitAnswers]]:
    """Closes what a test opened."""
    known: list[SplitAnswers] = []

    def remember(answers: SplitAnswers) -> SplitAnswers:
        known.append(answers)
        return answers

    yield remember
    for answers in known:
        answers.prefill.close()
        answers.decode.close()


def answers_of(engine: MergedAnswers) -> list[list[int]]:
    names = [engine.submit(prompt, ignore_eos=True) for prompt in PROMPTS]
    engine.run()
    return [engine.answered(name).tokens() for name in names]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["layer", "request"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp32", "bf16", "fp16", "int8"])
def test_pd_07_tokens_are_mergeds_by_every_backend(
    folder: Path, backend: str, mode: str, kv_cache_dtype: str, opened: Callable[[SplitAnswers], SplitAnswers]
) -> None:
    shape: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "block_size": 16, "prefill_chunk_tokens": 13}
    expected = answers_of(MergedAnswers(folder, **shape))
    split = opened(SplitAnswers(folder, transfer_backend=backend, transfer_mode=mode, **shape))

    assert answers_of(split) == expected
    assert answers_of(split) == expected  # once more, now with prefix hits
    assert len({tuple(answer) for answer in expected}) > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
def test_chunks_change_no_token_by_any_backend(
    folder: Path, backend: str, chunk: int, opened: Callable[[SplitAnswers], SplitAnswers]
) -> None:
    expected = answers_of(MergedAnswers(folder))
    split = opened(SplitAnswers(folder, transfer_backend=backend, prefill_chunk_tokens=chunk))

    assert answers_of(split) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_changes_no_token_by_any_backend(
    folder: Path, backend: str, opened: Callable[[SplitAnswers], SplitAnswers]
) -> None:
    expected = answers_of(MergedAnswers(folder))
    split = opened(SplitAnswers(folder, transfer_backend=backend, num_kv_blocks=27))

    assert answers_of(split) == expected
    assert split.decode.stats().num_preemptions > 0
    assert split.decode.stats().num_blocks_in_use == split.prefill.stats().num_blocks_in_use == 0


@pytest.mark.skipif(available("nixl") is not None, reason=str(available("nixl")))
def test_sides_of_different_backends_are_refused_by_name(folder: Path) -> None:
    decode = build_decode(make_config(folder, "decode", {}), lambda _: None).engine
    prefill = build_prefill(make_config(folder, "prefill", {"transfer_backend": "nixl"}), lambda: None).engine

    refusal = prefill.pair(PEER, decode.pair_message(), decode.kv_memory_fd, lambda _: None)

    assert refusal is not None
    assert "'local'" in refusal
    assert "'nixl'" in refusal
    prefill.close()
    decode.close()


@pytest.mark.parametrize(
    ("backend", "device", "named"), [("local", "cuda:0", "'nixl' or 'cuda_ipc'"), ("cuda_ipc", "cpu", "'local'")]
)
@pytest.mark.parametrize("build", [build_decode, build_prefill])
def test_a_backend_is_refused_on_a_device_it_is_not_for(
    folder: Path, backend: str, device: str, named: str, build: Callable[[Any, Any], object]
) -> None:
    config = make_config(folder, "decode", {"transfer_backend": backend, "device": device})

    with pytest.raises(ModelLoadError, match=named):
        build(config, lambda *_: None)
