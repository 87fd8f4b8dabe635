"""What the machine allows at most: memory speed bounds decode, matrix products bound prefill. Pure arithmetic.

A decode step reads every weight once and the keys and values of every earlier token. Prefill multiplies every weight
with every token; attention multiplies each token with all before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}
GROUP_SIZE = 32  # weights that share a scale and a minimum in int4
INT4_BYTES = 0.5 + 2 * 2 / GROUP_SIZE  # two fp16 numbers per group
# A file of the bundled engine's own quantised weights: last part of a tensor's name -> bytes a value takes when served.
OWN_FORMS = {"q": 0.5, "q8": 1.0, "d": 2.0, "m": 2.0, "d8": 2.0}


class Footprint(Struct, frozen=True, kw_only=True):
    """Bytes that a decode step reads."""

    weight_bytes: float
    kv_bytes_per_token: float

    def step_bytes(self, num_tokens: float) -> float:
        return self.weight_bytes + num_tokens * self.kv_bytes_per_token


class Machine(Struct, frozen=True, kw_only=True):
    """What was measured of this machine."""

    memory_read_bytes_per_second: float
    bf16_flops_per_second: float
    num_threads: int
    torch_version: str = ""


def fastest(first: Machine, second: Machine) -> Machine:
    """The better of each speed."""
    return Machine(
        memory_read_bytes_per_second=max(first.memory_read_bytes_per_second, second.memory_read_bytes_per_second),
        bf16_flops_per_second=max(first.bf16_flops_per_second, second.bf16_flops_per_second),
        num_threads=first.num_threads,
        torch_version=first.torch_version,
    )


class ModelShape(Struct, frozen=True, kw_only=True):
    """Of a decoder whose weights lie in `folder`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_matrix_values: int  # multiplied with every token
    num_head_values: int  # of the output head: multiplied once per answered token

    def kv_bytes_per_token(self, value_bytes: float) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * value_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Products of all tokens, attention over half of the square on average, and one row of the head."""
        linear = 2.0 * self.num_matrix_values * num_tokens + 2.0 * self.num_head_values
        attention = 2.0 * num_tokens**2 * self.num_heads * self.head_dim * self.num_layers
        return linear + attention


class Bound(Struct, frozen=True, kw_only=True):
    """Of one figure of one engine. Rates are tokens a second."""

    figure: str
    limit: float
    reached: float
    explanation: str

    @property
    def share(self) -> float:
        return self.reached / self.limit


def decode_bound(figure: str, reached: float, footprint: Footprint, num_tokens: float, machine: Machine) -> Bound:
    """`num_tokens` in the cache on average while the figure was measured."""
    step_bytes = footprint.step_bytes(num_tokens)
    kv_bytes = num_tokens * footprint.kv_bytes_per_token
    return Bound(
        figure=figure,
        limit=machine.memory_read_bytes_per_second / step_bytes,
        reached=reached,
        explanation=f"reads {footprint.weight_bytes / 1e6:.1f} MB weights + {kv_bytes / 1e6:.1f} MB KV a step",
    )


def prefill_bound(figure: str, reached: float, shape: ModelShape, num_tokens: int, machine: Machine) -> Bound:
    flops = shape.prefill_flops(num_tokens)
    return Bound(
        figure=figure,
        limit=machine.bf16_flops_per_second * num_tokens / flops,
        reached=reached,
        explanation=f"needs {flops / 1e9:.0f} GFLOP",
    )


def read_shape(folder: Path) -> ModelShape | None:
    """From config.json and the headers of the weights; None where they don't say it in the usual words."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = tensor_shapes(folder, own=False)
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    matrices = {name: math.prod(shape) for name, shape in tensors.items() if len(shape) == 2}
    embedding = sum(size for name, size in matrices.items() if "embed" in name)
    head = sum(size for name, size in matrices.items() if "lm_head" in name)
    return ModelShape(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_matrix_values=sum(matrices.values()) - embedding - head,
        num_head_values=head or embedding,  # tied: the embedding is the head too
    )


def weight_bytes(folder: Path, shape: ModelShape, weight_dtype: str) -> float:
    """What one step reads of the weights. int4 from a GGUF has exactly its values; else the head stays at 8 bits."""
    if weight_dtype in BYTES_PER_VALUE:
        return BYTES_PER_VALUE[weight_dtype] * (shape.num_matrix_values + shape.num_head_values)
    own = tensor_shapes(folder, own=True)
    if own:
        return sum(OWN_FORMS.get(name.rpartition(".")[2], 0.0) * math.prod(size) for name, size in own.items())
    return INT4_BYTES * shape.num_matrix_values + shape.num_head_values


def tensor_shapes(folder: Path, *, own: bool) -> dict[str, list[int]]:
    """Of the model's files, or of the bundled engine's own quantised one."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if (file.name == "quantized.safetensors") == own:
            header = _header(file)
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


def _header(file: Path) -> Mapping[str, Any]:
    """A safetensors file begins with the length of a JSON object that describes its tensors."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header
