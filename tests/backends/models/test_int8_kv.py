"""A KV cache in int8: the same tokens however the work is cut, and logits close to those over an exact cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from model_helpers import DENSE, THROUGH_TRANSFORMERS, Driver, make_folder, make_prompts, make_request
from safetensors.torch import load_file, save_file

from backends.attention.compiled import CompiledAttention
from backends.attention.paged import PagedAttention, even_out
from backends.models.base import LoadedModel
from backends.models.dense import DenseModel
from backends.models.loader import load_model
from backends.native import library
from backends.protocol.messages import SamplingParams
from backends.worker.input_batch import build_input_batch

WAYS = [False, *([True] if library.available() else [])]  # with the compiled decode step, or by torch alone
NUM_TOKENS = 16


def biased_qwen2(folder: Path, size: float) -> LoadedModel:
    """Every seventh element of a key is larger by `size`, whatever the token, as a few are in Qwen2.5."""
    make_folder(folder, "Qwen2", {})
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("k_proj.bias"):
            weight[::7] += size
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_model(folder, dtype="fp32")


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "qwen3", "gemma2", "gpt2"])
def test_chunks_batches_and_reused_blocks_do_not_change_the_tokens(tmp_path: Path, name: str, compiled: bool) -> None:
    family, extra = (DENSE | THROUGH_TRANSFORMERS)[name]
    loaded = load_model(make_folder(tmp_path, family, extra), dtype="fp32")
    if compiled and name not in DENSE:
        pytest.skip("the compiled step is for dense models")
    prompts = make_prompts(1, 15, 17, 41)
    driver = Driver(loaded, kv_dtype="int8", compiled=compiled)
    alone = [driver.run([prompt], NUM_TOKENS, chunk=64)[0] for prompt in prompts]

    assert len({tuple(answer) for answer in alone}) == len(prompts)
    assert driver.run(prompts, NUM_TOKENS, chunk=7, starts=[3, 0, 1, 2]) == alone


def logits_of_all(loaded: LoadedModel, prompt: list[int], kv_dtype: str, chunk: int) -> torch.Tensor:
    """Of every position, chunk by chunk through the cache, so that early chunks are read back from it."""
    driver = Driver(loaded, kv_dtype=kv_dtype)
    request = make_request(prompt, SamplingParams(temperature=0))
    parts = []
    with torch.inference_mode():
        while request.num_computed_tokens < len(prompt):
            item = driver.schedule(request, min(chunk, len(prompt) - request.num_computed_tokens))
            batch = build_input_batch([item], driver.cache.block_size, "cpu")
            attention = PagedAttention(driver.cache.tensor, batch.step, CompiledAttention())
            rows = torch.arange(item.num_tokens)
            parts.append(loaded.model.forward(batch.token_ids, batch.positions, attention, rows).float())
            request.num_computed_tokens += item.num_tokens
    return torch.cat(parts)


@pytest.mark.parametrize(("size", "bound"), [(0.0, 0.05), (30.0, 0.09), (150.0, 0.3)])
def test_what_key_biases_cost_is_bounded(tmp_path: Path, size: float, bound: float) -> None:
    """The other elements of a key are about 2.4. Evening out the sizes of elements halves what a large bias costs."""
    loaded = biased_qwen2(tmp_path, size)
    (prompt,) = make_prompts(60)
    exact, rounded = (logits_of_all(loaded, prompt, dtype, chunk=16) for dtype in ("fp32", "int8"))
    difference = float((exact - rounded).abs().mean() / exact.std())
    sys.stdout.write(f"\nkey biases of {size}: logits differ by {difference:.4f} standard deviations\n")

    assert difference < bound


def test_evened_out_keys_give_the_same_scores(tmp_path: Path) -> None:
    biased_qwen2(tmp_path, 30.0)
    loaded = load_model(tmp_path, dtype="bf16")
    assert isinstance(loaded.model, DenseModel)
    sizes = loaded.model.weights.layers[0].attention.key_sizes
    assert sizes is not None
    assert float(sizes.max() / sizes.min()) >= 4.0
    half = sizes.shape[1] // 2
    assert torch.equal(sizes[:, :half], sizes[:, half:]), "rotation mixes an element with that of the other half"
    assert torch.equal(sizes.log2().round(), sizes.log2()), "only powers of two are exact in every float type"
    query, key = torch.randn(5, 4, 2 * half).bfloat16(), torch.randn(5, 2, 2 * half).bfloat16()
    even_query, even_key = even_out(query, key, sizes)
    for head in range(4):
        products = query[:, head].float() * key[:, head // 2].float()
        assert torch.equal(even_query[:, head].float() * even_key[:, head // 2].float(), products)


def test_models_without_biases_are_left_alone(tmp_path: Path) -> None:
    loaded = load_model(make_folder(tmp_path, "Llama", {}), dtype="fp32")
    assert isinstance(loaded.model, DenseModel)
    assert all(layer.attention.key_sizes is None for layer in loaded.model.weights.layers)


@pytest.mark.skipif(not library.available(), reason=f"no kernels: {library.load()}")
def test_compiled_steps_read_evened_out_keys_and_write_them(tmp_path: Path) -> None:
    loaded = biased_qwen2(tmp_path, 30.0)
    prompts = make_prompts(5, 20, 33)
    by_torch, by_kernel = (
        Driver(loaded, kv_dtype="int8", compiled=compiled).run(prompts, NUM_TOKENS, chunk=64)
        for compiled in (False, True)
    )
    assert by_kernel == by_torch
    assert len({tuple(answer) for answer in by_torch}) == len(prompts)
