"""GGUF tensors under Hugging Face's names, in its row order: as floats, and as the 4- and 8-bit codes they came from.

Knows the dense decoder families below and nothing of configs, tokenizers or folders. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, ReaderTensor
from gguf.quants import dequantize

from backends.models.safetensors_writer import TensorEntry

Array = npt.NDArray[Any]

CODE_GROUP = 32  # inputs that share one scale, in every format below

FAMILIES = {"llama": "Llama and Mistral", "qwen2": "Qwen 2", "qwen3": "Qwen 3"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufRefused(Exception):
    """This GGUF can't be converted faithfully: what it holds, what is accepted, what to do."""


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """What undoing the row order of Llama files needs."""

    architecture: str
    num_heads: int
    num_kv_heads: int

    def rows_in_hf_order(self, gguf_name: str, rows: Array) -> Array:
        """Llama files interleave the two halves of each head of q and k (for ggml's rotary embedding)."""
        if self.architecture != "llama":
            return rows
        if ".attn_q." in gguf_name:
            return _split_halves(rows, self.num_heads)
        if ".attn_k." in gguf_name:
            return _split_halves(rows, self.num_kv_heads)
        return rows


def _split_halves(rows: Array, num_heads: int) -> Array:
    """[head, pair, half, ...] -> [head, half, pair, ...]"""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        layer, part, kind = match.groups()
        if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    top, _, kind = gguf_name.partition(".")
    if top in _TOP and kind == "weight":
        return f"{_TOP[top]}.weight"
    raise GgufRefused(
        f"The GGUF file holds a tensor {gguf_name!r} that a plain {', '.join(FAMILIES.values())} model doesn't have, "
        f"so converting it would change the model. Use the model's Hugging Face folder instead."
    )


def float_entries(tensors: Iterable[ReaderTensor], heads: AttentionHeads) -> list[TensorEntry]:
    """Every tensor in fp32: scale * code + minimum isn't exact in anything shorter."""
    return [
        TensorEntry(hf_name(tensor.name), "F32", _shape(tensor), partial(_floats, tensor, heads)) for tensor in tensors
    ]


def code_entries(tensors: Iterable[ReaderTensor], heads: AttentionHeads) -> list[TensorEntry]:
    """The codes of the tensors whose format is plain enough for our kernels; the others have none."""
    entries: list[TensorEntry] = []
    for tensor in tensors:
        if unpack := _UNPACK.get(tensor.tensor_type):
            entries.extend(unpack(tensor, heads))
    return entries


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # ggml writes the fastest dimension first


def _floats(tensor: ReaderTensor, heads: AttentionHeads) -> Array:
    try:
        weights: Array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise GgufRefused(
            f"The GGUF file holds {tensor.name!r} in format {tensor.tensor_type.name}, which can't be read here. "
            f"Use a file in Q4_0, Q4_1, Q5_*, Q8_0, a K-quant, F16 or BF16, or the model's Hugging Face folder."
        ) from error
    return heads.rows_in_hf_order(tensor.name, weights.astype(np.float32, copy=False))


# ------------------------------------------------------------------------------- codes: value = code * scale + minimum
#
# A block of a row covers 32 inputs. Bytes of a block:
#   Q4_0: fp16 scale, 16 bytes of codes            value = (code - 8) * scale
#   Q4_1: fp16 scale, fp16 minimum, 16 bytes       value = code * scale + minimum
#   Q8_0: fp16 scale, 32 signed bytes              value = code * scale
# Input i < 16 of a block is the low half of byte i, input i + 16 the high half.


def _blocks(tensor: ReaderTensor, heads: AttentionHeads) -> Array:
    """[out, in / 32, bytes of a block]"""
    rows = np.asarray(tensor.data).view(np.uint8)
    num_blocks = _shape(tensor)[-1] // CODE_GROUP
    return heads.rows_in_hf_order(tensor.name, rows.reshape(rows.shape[0], num_blocks, -1))


def _halves(tensor: ReaderTensor, heads: AttentionHeads, start: int) -> Array:
    return np.ascontiguousarray(_blocks(tensor, heads)[..., start : start + 2]).view("<f2")[..., 0]


def _nibbles(tensor: ReaderTensor, heads: AttentionHeads, start: int) -> Array:
    packed = _blocks(tensor, heads)[..., start:]
    return np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(_shape(tensor))


def _minimum_of_q4_0(tensor: ReaderTensor, heads: AttentionHeads) -> Array:
    return _halves(tensor, heads, 0) * np.float16(-8)


def _signed_bytes(tensor: ReaderTensor, heads: AttentionHeads) -> Array:
    return np.ascontiguousarray(_blocks(tensor, heads)[..., 2:]).view(np.int8).reshape(_shape(tensor))


def _unpack_q4_0(tensor: ReaderTensor, heads: AttentionHeads) -> list[TensorEntry]:
    if not np.isfinite(_minimum_of_q4_0(tensor, heads)).all():
        return []  # a scale above 8188 has no fp16 minimum; the fp32 weights remain
    return _four_bit(tensor, partial(_nibbles, tensor, heads, 2), heads, partial(_minimum_of_q4_0, tensor, heads))


def _unpack_q4_1(tensor: ReaderTensor, heads: AttentionHeads) -> list[TensorEntry]:
    return _four_bit(tensor, partial(_nibbles, tensor, heads, 4), heads, partial(_halves, tensor, heads, 2))


def _four_bit(
    tensor: ReaderTensor, codes: Callable[[], Array], heads: AttentionHeads, minimum: Callable[[], Array]
) -> list[TensorEntry]:
    name, shape = hf_name(tensor.name), _shape(tensor)
    per_group = (*shape[:-1], shape[-1] // CODE_GROUP)
    return [
        TensorEntry(f"{name}.q", "U8", shape, codes),
        TensorEntry(f"{name}.d", "F16", per_group, partial(_halves, tensor, heads, 0)),
        TensorEntry(f"{name}.m", "F16", per_group, minimum),
    ]


def _unpack_q8_0(tensor: ReaderTensor, heads: AttentionHeads) -> list[TensorEntry]:
    name, shape = hf_name(tensor.name), _shape(tensor)
    per_group = (*shape[:-1], shape[-1] // CODE_GROUP)
    return [
        TensorEntry(f"{name}.q8", "I8", shape, partial(_signed_bytes, tensor, heads)),
        TensorEntry(f"{name}.d8", "F16", per_group, partial(_halves, tensor, heads, 0)),
    ]


_UNPACK: dict[GGMLQuantizationType, Callable[[ReaderTensor, AttentionHeads], list[TensorEntry]]] = {
    GGMLQuantizationType.Q4_0: _unpack_q4_0,
    GGMLQuantizationType.Q4_1: _unpack_q4_1,
    GGMLQuantizationType.Q8_0: _unpack_q8_0,
}
