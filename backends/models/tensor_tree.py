"""A model's parts as plain data and numbered tensors, and back. Knows which classes hold tensors, and no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from backends.attention.base import AttentionParams
from backends.models.dense import DenseLayer
from backends.models.linear import KernelLinear, MixedLinear, PlainLinear, WideLinear
from backends.models.quantization import Int8Rows, PackedInt4, PackedNibblePair
from backends.native.library import PackedMatrix, WeightKind

_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        AttentionParams, DenseLayer, KernelLinear, MixedLinear, PlainLinear, WideLinear, Int8Rows, PackedInt4,
        PackedMatrix, PackedNibblePair,
    )
}  # fmt: skip


def encode(value: Any, put: Callable[[Tensor], int]) -> Any:
    """`put` keeps a tensor and gives its number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": put(value)}
    if isinstance(value, tuple):
        return [encode(item, put) for item in value]
    name = type(value).__name__
    kind: Any = _CLASSES.get(name)
    if kind is not type(value):
        raise TypeError(f"{name} has no form in a file of tensors")
    return {"class": name, "fields": {field: encode(getattr(value, field), put) for field in _fields(kind)}}


def _fields(kind: Any) -> list[str]:
    """The names of what it is made of, which are those of its arguments."""
    if kind is PackedMatrix:
        return ["kind", "data", "out_features", "in_features", "bias"]
    return [field.name for field in fields(kind)]


def decode(data: Any, tensors: Sequence[Tensor]) -> Any:
    """What `encode` was given, over these tensors."""
    if isinstance(data, list):
        return tuple(decode(item, tensors) for item in data)
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    arguments = {name: decode(item, tensors) for name, item in data["fields"].items()}
    if data["class"] == "PackedMatrix":
        arguments["kind"] = WeightKind(arguments["kind"])
    return _CLASSES[data["class"]](**arguments)
