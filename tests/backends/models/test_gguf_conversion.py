"""A converted folder is the model that transformers reads from the GGUF file, and its codes are the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import F16, F32, Q4_0, Q4_1, Q8_0, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from backends.models.cache import read_complete
from backends.models.gguf import convert
from backends.models.gguf_weights import GgufRefused

torch.set_num_threads(1)


def converted(tmp_path: Path, **options: Any) -> Path:
    source = write_gguf(tmp_path / "tiny.gguf", **options)
    target = tmp_path / "folder"
    target.mkdir()
    convert(source, target, "tiny", "0" * 64, lambda stage: None)
    return target


def reference_tensors(source: Path, model: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    return tensors


def codes_as_floats(codes: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if f"{name}.q8" in codes:
        values, scales = codes[f"{name}.q8"].float(), codes[f"{name}.d8"].float()
        return (values.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2)
    values, scales, minima = (codes[f"{name}.{part}"].float() for part in "qdm")
    return (values.unflatten(-1, (-1, 32)) * scales[..., None] + minima[..., None]).flatten(-2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("linear", "embedding"), [(Q4_1, Q8_0), (Q4_0, Q4_0), (F16, F32)])
def test_weights_are_exactly_those_that_transformers_reads(
    tmp_path: Path, architecture: str, linear: Any, embedding: Any
) -> None:
    folder = converted(tmp_path, architecture=architecture, linear=linear, embedding=embedding)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = reference_tensors(tmp_path / "tiny.gguf", model)

    state = model.state_dict()
    assert model.dtype == torch.float32
    assert set(state) - {"lm_head.weight"} == set(expected) - {"lm_head.weight"}
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("linear", [Q4_0, Q4_1, Q8_0])
def test_codes_stand_for_the_same_numbers_in_the_same_order(tmp_path: Path, linear: Any) -> None:
    folder = converted(tmp_path, linear=linear)
    floats, codes = load_file(folder / "model.safetensors"), load_file(folder / "quantized.safetensors")

    matrices = {name for name, tensor in floats.items() if tensor.dim() == 2}
    assert {name.rsplit(".", 1)[0] for name in codes} == matrices
    assert all(torch.equal(codes_as_floats(codes, name), floats[name]) for name in matrices)
    if linear != Q8_0:
        values = codes["model.layers.0.self_attn.q_proj.weight.q"]
        assert (values.dtype, int(values.min()), int(values.max())) == (torch.uint8, 0, 15)


def test_floats_without_codes_make_no_file_of_codes(tmp_path: Path) -> None:
    folder = converted(tmp_path, linear=F16, embedding=F32)

    assert not (folder / "quantized.safetensors").exists()
    assert read_complete(folder) is not None


def test_config_and_end_marks_are_taken_over(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 100_000.0
    assert (config["max_position_embeddings"], config["dtype"], config["head_dim"]) == (128, "float32", 16)
    assert (generation["eos_token_id"], generation["bos_token_id"]) == (2, 1)


def test_cx_07_special_tokens_stay_whole_and_odd_strings_come_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))

    assert tokenizer.encode("<|im_start|>x<|im_end|>")[0::2] == [1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    for text in [
        " leading",
        "two  spaces",
        "tab\tand\r\nline",
        "Café déjà",
        "你好，世界",
        "🙂👩‍👩‍👧",
        "x = 1+23;\n\n",
        "\u0301",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_off_before_the_spaces_in_front_of_them(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))

    assert tokenizer.tokenize("the  12") == ["the", "ĠĠ", "1", "2"]


def test_the_chat_template_is_taken_over(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))

    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_an_unknown_way_of_splitting_is_said(tmp_path: Path) -> None:
    folder = converted(tmp_path, pre="martian")

    complete = read_complete(folder)
    assert complete is not None
    assert "'martian'" in complete.marker["notices"][0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        ({"rope_scaling": "yarn"}, "scales its rotary embedding"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"num_layers_written": 1}, "2 layers"),
    ],
)
def test_what_would_change_the_model_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(GgufRefused, match=reason):
        converted(tmp_path, **options)
