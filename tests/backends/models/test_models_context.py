"""A context beyond the model's own: what is served equals transformers with the same RoPE scaling, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_helpers import Driver, make_folder, make_prompts

from backends.models.context import plan_context
from backends.models.loader import load_model
from backends.models.spec import ModelLoadError
from backends.native import library

OWN = 64
ASKED = 256
SIZES = {"max_position_embeddings": OWN}
NUM_TOKENS = 24


def answers_of_transformers(folder: Path, prompts: list[list[int]], rope: dict[str, Any] | None) -> list[list[int]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    if rope is not None:
        config.rope_parameters = rope
    config.max_position_embeddings = ASKED
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def yarn(factor: float, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": OWN,
        **more,
    }


@pytest.mark.parametrize(
    ("family", "extra"),
    [("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 16}), ("Gemma", {"head_dim": 16}), ("GPTNeoX", {})],
)
@pytest.mark.parametrize("chunk", [7, 300])
def test_prompts_beyond_the_models_own_context_are_answered_as_by_transformers(
    family: str, extra: dict[str, Any], chunk: int, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, family, SIZES | extra)
    loaded = load_model(folder, dtype="fp32", max_model_len=ASKED)
    prompts = make_prompts(20, 150, 200)
    expected = answers_of_transformers(folder, prompts, _rope_of(folder, ASKED / OWN))
    assert Driver(loaded, num_blocks=96).run(prompts, NUM_TOKENS, chunk=chunk) == expected


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_the_compiled_decode_step_is_stretched_too(kv_dtype: str, tmp_path: Path) -> None:
    if reason := library.unavailable_reason():
        pytest.skip(reason)
    loaded = load_model(make_folder(tmp_path, "Llama", SIZES), dtype="fp32", max_model_len=ASKED)
    prompts = make_prompts(20, 150, 200)
    through_torch, compiled = (
        Driver(loaded, num_blocks=96, compiled=way, kv_dtype=kv_dtype).run(prompts, NUM_TOKENS, chunk=64)
        for way in (False, True)
    )
    assert compiled == through_torch


def _rope_of(folder: Path, factor: float) -> dict[str, Any]:
    own = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    return own | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": OWN}


def test_a_model_that_is_scaled_by_yarn_goes_on_from_there(tmp_path: Path) -> None:
    own = {"max_position_embeddings": 128, "rope_parameters": yarn(2.0, beta_fast=16)}
    folder = make_folder(tmp_path, "Llama", own)
    prompts = make_prompts(150, 40)
    expected = answers_of_transformers(folder, prompts, yarn(4.0, beta_fast=16))
    loaded = load_model(folder, dtype="fp32", max_model_len=ASKED)
    assert Driver(loaded, num_blocks=64).run(prompts, NUM_TOKENS, chunk=64) == expected
    assert loaded.spec.rope_scaling == "yarn, factor 4"


def test_a_scaling_that_reaches_as_far_is_left_alone() -> None:
    plan = plan_context({"max_position_embeddings": OWN, "rope_scaling": yarn(4.0)}, ASKED)
    assert (plan.length, plan.scaling, plan.notices) == (ASKED, None, ())


def test_the_extension_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Llama", SIZES)
    own, more = (load_model(folder, dtype="fp32", max_model_len=length).spec for length in (None, ASKED))
    assert (own.max_model_len, own.native_max_model_len, own.rope_scaling, own.notices) == (OWN, OWN, "", ())
    assert (more.max_model_len, more.native_max_model_len, more.rope_scaling) == (ASKED, OWN, "yarn, factor 4")
    assert "RoPE scaling (yarn, factor 4)" in more.notices[0]
    assert "not trained" in more.notices[0]
    assert own.fingerprint != more.fingerprint, "their KV differs"


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("GPT2", {"n_positions": OWN, "n_layer": 2, "n_head": 4, "n_embd": 64}, "gpt2 models have no rotary"),
        ("Mistral", {"sliding_window": 9}, "sliding window"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, "sliding window"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaled already"),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "opt models have no rotary"),
    ],
)
def test_a_model_that_cannot_be_extended_is_refused_by_name(
    family: str, extra: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, family, SIZES | extra)
    with pytest.raises(ModelLoadError, match=reason) as refusal:
        load_model(folder, dtype="fp32", max_model_len=ASKED)
    assert "max_model_len" in str(refusal.value)


@pytest.mark.parametrize(
    "text", [{"rope_parameters": {"full_attention": {"rope_type": "default"}}}, {"n_positions": 64}]
)
def test_what_a_config_shows_is_refused_before_weights_are_read(text: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="can't be extended"):
        plan_context({"max_position_embeddings": OWN} | text, ASKED)
