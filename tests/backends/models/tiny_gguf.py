"""GGUF files of a few kilobytes with random weights, of each family and format that is converted."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 64, 96, 4, 2, 16, 2
Q4_0, Q4_1, Q8_0, F16, F32 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "F32"))

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


TOKENS = [*SPECIAL, *byte_alphabet(), "ĠĠ", "th", "the"]


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    linear: GGMLQuantizationType = Q4_1,
    embedding: GGMLQuantizationType = Q8_0,
    pre: str = "smollm",
    num_layers_written: int = NUM_LAYERS,
    rope_scaling: str | None = None,
    extra_tensor: str | None = None,
    seed: int = 0,
) -> Path:
    writer = GGUFWriter(path, architecture)
    _write_config(writer, rope_scaling)
    _write_tokenizer(writer, pre)
    random = np.random.default_rng(seed)

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(TOKENS), HIDDEN), embedding)
    add("output_norm.weight", (HIDDEN,), F32)
    for layer in range(num_layers_written):
        for name, shape in _layer_shapes(architecture).items():
            is_vector = len(shape) == 1
            add(f"blk.{layer}.{name}", shape, F32 if is_vector else linear)
    if extra_tensor is not None:
        add(extra_tensor, (HEAD_DIM // 2,), F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (queries, HIDDEN),
        "attn_k.weight": (keys, HIDDEN),
        "attn_v.weight": (keys, HIDDEN),
        "attn_output.weight": (HIDDEN, queries),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
        "ffn_up.weight": (INTERMEDIATE, HIDDEN),
        "ffn_down.weight": (HIDDEN, INTERMEDIATE),
    }
    if architecture == "qwen2":
        shapes |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    if architecture == "qwen3":
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    return shapes


def _write_config(writer: GGUFWriter, rope_scaling: str | None) -> None:
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_block_count(NUM_LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if rope_scaling is not None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", rope_scaling)


def _write_tokenizer(writer: GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_wheel(path: Path, member: str, content: bytes) -> Path:
    """A package that pip accepts: `path` is named as wheels are."""
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/{member}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
