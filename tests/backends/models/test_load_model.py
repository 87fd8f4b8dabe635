"""What loading a folder finds, adjusts, and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model_helpers import DENSE, Driver, make_folder, make_prompts
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from backends.models.dense_config import fits_dense_decoder, read_dense_config, rotary_frequencies
from backends.models.hf import HFModel
from backends.models.hf_probe import unseen_masks
from backends.models.linear_loader import plan_weights
from backends.models.loader import load_model
from backends.models.quantization import quantize_to_int4, quantize_to_int8
from backends.models.spec import ModelLoadError
from backends.models.weights import fingerprint
from support.generated_tokens import generate


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_folder(tmp_path, "Llama", {"tie_word_embeddings": True})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize("name", DENSE)
def test_a_config_means_what_transformers_says(name: str, tmp_path: Path) -> None:
    family, extra = DENSE[name]
    make_folder(tmp_path, family, extra)
    dense = read_dense_config(json.loads((tmp_path / "config.json").read_text()))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert dense.num_kv_heads == config.num_key_value_heads
    assert dense.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert dense.tie_word_embeddings == config.tie_word_embeddings
    assert dense.rms_norm_eps == config.rms_norm_eps


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_means_what_transformers_says(family: str) -> None:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "vocab_size": 64,
        "max_position_embeddings": 512,
    }
    dense = read_dense_config(sizes | {"model_type": family})
    config = transformers.AutoConfig.for_model(family, **sizes)
    assert dense.num_kv_heads == config.num_key_value_heads
    assert dense.head_dim == (getattr(config, "head_dim", None) or 128)
    assert dense.rms_norm_eps == config.rms_norm_eps
    assert dense.tie_word_embeddings == config.tie_word_embeddings
    assert set(dense.sliding_windows) == {getattr(config, "sliding_window", None)}
    sliding = {"use_sliding_window": True, "max_window_layers": 7, "sliding_window": 5}
    if family.startswith("qwen"):
        kinds = transformers.AutoConfig.for_model(family, **sizes, **sliding).layer_types
        windows = read_dense_config(sizes | sliding | {"model_type": family}).sliding_windows
        assert [window is not None for window in windows] == [kind == "sliding_attention" for kind in kinds]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": 5000.0, "rope_scaling": None},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {},
    ],
)
def test_old_and_new_spellings_of_rotary_settings_mean_the_same(llama: Path, rope: dict[str, Any]) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["rope_parameters"]
    (llama / "config.json").write_text(json.dumps(config | rope))
    ours, factor = rotary_frequencies(config | rope, 16)
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(llama)
    )
    assert torch.equal(ours, reference.inv_freq)
    assert factor == pytest.approx(reference.attention_scaling)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma"},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
    ],
)
def test_anything_unusual_is_left_to_transformers(change: dict[str, Any]) -> None:
    assert fits_dense_decoder({"model_type": "llama"})
    assert not fits_dense_decoder({"model_type": "llama"} | change)


# -------------------------------------------------------------------------------------------------------- facts


def test_end_tokens_of_both_configs_are_joined(llama: Path) -> None:
    edit_config(llama, eos_token_id=5)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model(llama, dtype="fp32").spec.eos_token_ids == {5, 7, 9}


def test_the_context_is_what_was_asked_or_the_models_own(llama: Path) -> None:
    assert load_model(llama, dtype="fp32").spec.max_model_len == 256
    assert load_model(llama, dtype="fp32", max_model_len=100).spec.max_model_len == 100


def test_other_weights_or_config_have_another_fingerprint(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "a", "Llama", {})
    assert fingerprint(first) == fingerprint(make_folder(tmp_path / "b", "Llama", {}))
    assert fingerprint(first) != fingerprint(make_folder(tmp_path / "c", "Llama", {"initializer_range": 0.31}))
    before = fingerprint(first)
    edit_config(first, rms_norm_eps=1e-5)
    assert fingerprint(first) != before


def test_sharded_weights_are_found(tmp_path: Path) -> None:
    whole = make_folder(tmp_path / "whole", "Qwen2", {})
    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="50KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 1
    prompts = make_prompts(20)
    answers = [Driver(load_model(path, dtype="fp32")).run(prompts, 8, chunk=8) for path in (whole, sharded)]
    assert answers[0] == answers[1]


# ----------------------------------------------------------------------------------------------------- refusals


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match=r"hidden_layers|attention_heads"):
        load_model(tmp_path)


def test_missing_damaged_and_foreign_tensors_are_named(llama: Path) -> None:
    path = llama / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.ones(4)}, path)
    with pytest.raises(ModelLoadError, match="sinks"):
        load_model(llama, dtype="fp32")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.2.mlp.up" not in name}, path)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(llama, dtype="fp32")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="can't be read"):
        load_model(llama, dtype="fp32")
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        load_model(llama, dtype="fp32")


@pytest.mark.parametrize(("family", "extra"), [("Mamba", {"state_size": 4}), ("Bloom", {"n_layer": 2, "n_head": 4})])
def test_models_that_need_more_than_a_paged_cache_are_refused(
    family: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, family, extra)
    with pytest.raises(ModelLoadError, match=r"0 of . layers let their attention be replaced"):
        load_model(folder, dtype="fp32", max_model_len=64)


def test_a_model_whose_attention_does_more_than_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for a future family: its own attention adds a bias that replacing it would lose."""
    gemma = transformers.models.gemma.modeling_gemma
    own = gemma.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return own(module, query, key + 1, value * 1.5, mask, **kwargs)

    folder = make_folder(tmp_path, "Gemma", {"head_dim": 16})
    load_model(folder, dtype="fp32")
    monkeypatch.setattr(gemma, "eager_attention_forward", biased)
    with pytest.raises(ModelLoadError, match="differ"):
        load_model(folder, dtype="fp32")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, [None, None]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [None, None]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, [4, 4]),
        ({"sliding_window": 4}, [None, None]),
        ({"attention_chunk_size": 4}, [None, None]),
    ],
)
def test_windows_that_attention_is_not_told_of_are_noticed(config: dict[str, Any], windows: list[int | None]) -> None:
    assert unseen_masks(SimpleNamespace(**config), windows)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, [None, 4]),
        ({"sliding_window": 4}, [4, 4]),
        ({"sliding_window": 4, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": None}, [None, None]),
        ({}, [None, None]),
    ],
)
def test_windows_that_attention_is_told_of_are_fine(config: dict[str, Any], windows: list[int | None]) -> None:
    assert not unseen_masks(SimpleNamespace(**config), windows)


def test_low_bit_weights_through_transformers_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Gemma", {"head_dim": 16})
    with pytest.raises(ModelLoadError, match="weight_dtype 'int4'"):
        load_model(folder, dtype="fp32", weight_dtype="int4")


# ------------------------------------------------------------------------------------------------------ weights


class NoBf16(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            assert not (isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)), func
        return out


def test_fp32_never_goes_through_a_shorter_type(llama: Path) -> None:
    add_own_values(llama)
    prompts = make_prompts(20)
    with NoBf16():
        loaded = load_model(llama, dtype="fp32")
        Driver(loaded).run(prompts, 4, chunk=8)
    assert (loaded.spec.dtype, loaded.spec.weight_dtype) == ("fp32", "fp32")


def add_own_values(folder: Path) -> None:
    """Round the weights to 4 and 8 bits, and lay the values beside them as the GGUF converter does."""
    path = folder / "model.safetensors"
    tensors, own = load_file(path), {}
    for name, weight in list(tensors.items()):
        if name == "model.embed_tokens.weight":
            rows = quantize_to_int8(weight)
            scale = rows.scale.float().half()[:, None].repeat(1, weight.shape[1] // 32)
            own |= {f"{name}.q8": rows.values, f"{name}.d8": scale}
            tensors[name] = rows.values.float() * scale.float().repeat_interleave(32, dim=1)
        elif weight.dim() == 2:
            four = quantize_to_int4(weight)
            scale, minimum = four.scale.half(), four.minimum.half()
            own |= {f"{name}.q": four.values, f"{name}.d": scale, f"{name}.m": minimum}
            wide = (part.float().repeat_interleave(32, dim=1) for part in (scale, minimum))
            tensors[name] = four.values.float() * next(wide) + next(wide)
    save_file(tensors, path, metadata={"format": "pt"})
    save_file(own, folder / "quantized.safetensors")


def test_a_folders_own_4_bit_values_are_used_as_they_are(llama: Path) -> None:
    add_own_values(llama)
    own = load_model(llama, dtype="bf16")
    assert own.spec.weight_dtype == "int4"
    assert own.spec.notices == ()
    assert load_model(llama, dtype="bf16", weight_dtype="int4").spec.notices == ()
    logits, reference = (last_logits(load_model(llama, dtype=dtype)) for dtype in ("bf16", "fp32"))
    assert torch.nn.functional.cosine_similarity(logits, reference, dim=0) > 0.99


@pytest.mark.parametrize("weight_dtype", ["auto", "bf16", "int8", "int4", "fp32"])
def test_a_chunk_that_samples_nothing_runs_with_every_weight_format(llama: Path, weight_dtype: str) -> None:
    add_own_values(llama)
    loaded = load_model(llama, dtype="bf16", weight_dtype=weight_dtype)
    [answer] = Driver(loaded).run(make_prompts(20), 3, chunk=8)
    assert len(answer) == 3


def last_logits(loaded: Any) -> torch.Tensor:
    """Logits after a prompt of few rows, so that low-bit kernels are used."""
    seen: list[torch.Tensor] = []
    forward = loaded.model.forward

    class Spy:
        def forward(self, *args: Any) -> torch.Tensor:
            seen.append(forward(*args))
            return seen[-1]

    Driver(type(loaded)(Spy(), loaded.spec)).run(make_prompts(5), 1, chunk=5)
    return seen[-1][0].float()


def test_values_of_another_model_are_refused(llama: Path) -> None:
    add_own_values(llama)
    path = llama / "quantized.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.q_proj.weight.q"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path)
    with pytest.raises(ModelLoadError, match="disagree"):
        load_model(llama, dtype="bf16")


@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "fp32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_weight_format_stays_close_to_the_model(llama: Path, dtype: str, weight_dtype: str) -> None:
    reference = last_logits(load_model(llama, dtype="fp32"))
    loaded = load_model(llama, dtype=dtype, weight_dtype=weight_dtype)
    assert loaded.spec.weight_dtype == weight_dtype
    floor = 0.8 if weight_dtype == "int4" else 0.99
    assert torch.nn.functional.cosine_similarity(last_logits(loaded), reference, dim=0) > floor
    if weight_dtype != "fp32":
        assert "requantised" in loaded.spec.notices[0]


def test_requantised_answers_don_t_depend_on_the_number_of_rows(llama: Path) -> None:
    loaded = load_model(llama, dtype="fp32", weight_dtype="int8")
    prompts = make_prompts(30)
    driver = Driver(loaded)
    assert driver.run(prompts, 8, chunk=30) == driver.run(prompts, 8, chunk=1)


@pytest.mark.parametrize(
    ("asked", "expected", "own"),
    [
        ({"dtype": "fp32", "weight_dtype": "auto", "has_own_values": True}, "fp32", False),
        ({"dtype": "bf16", "weight_dtype": "auto", "has_own_values": True}, "int4", True),
        ({"dtype": "bf16", "weight_dtype": "auto", "has_own_values": False}, "bf16", False),
        ({"dtype": "bf16", "weight_dtype": "bf16", "has_own_values": True}, "bf16", False),
        ({"dtype": "bf16", "weight_dtype": "int8", "has_own_values": True}, "int8", False),
        ({"dtype": "fp16", "weight_dtype": "auto", "has_own_values": True}, "fp16", False),
    ],
)
def test_which_weights_auto_means(asked: dict[str, Any], expected: str, own: bool) -> None:
    plan = plan_weights(device="cpu", **asked)
    assert (plan.weight_dtype, plan.own_values) == (expected, own)


def test_two_models_of_one_process_don_t_share_a_step(tmp_path: Path) -> None:
    folders = [
        make_folder(tmp_path / family, family, {"head_dim": 16, "tie_word_embeddings": False})
        for family in ("Gemma", "Gemma3Text")
    ]
    drivers = [Driver(load_model(folder, dtype="fp32")) for folder in folders]
    assert all(isinstance(load_model(folder, dtype="fp32").model, HFModel) for folder in folders)
    prompts = make_prompts(20)
    alternating = [driver.run(prompts, 6, chunk=8) for driver in drivers for _ in range(2)]
    expected = [generate(folder, prompts, 6) for folder in folders]
    assert alternating == [expected[0], expected[0], expected[1], expected[1]]
