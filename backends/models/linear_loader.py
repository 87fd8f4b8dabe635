"""Which form each weight matrix is kept in, and making it from a folder's tensors. Knows no layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backends.models.dtypes import TORCH_DTYPES
from backends.models.linear import MAX_NIBBLE_PAIR_ROWS, KernelLinear, Linear, MixedLinear, PlainLinear, WideLinear
from backends.models.quantization import (
    GROUP_SIZE,
    EightBitWeight,
    FourBitWeight,
    Int8Rows,
    can_pack,
    pack_eight_bit,
    pack_four_bit,
    quantize_to_int4,
    quantize_to_int8,
    stack_rows,
)
from backends.models.spec import ModelLoadError
from backends.models.weights import QuantizedFiles, WeightFiles
from backends.native import library
from backends.native.library import PackedMatrix, WeightKind

# Rows compared between a GGUF's own values and the floats beside them: enough to notice another model or row order.
NUM_CHECKED_ROWS = 8


LowBit = FourBitWeight | EightBitWeight | Int8Rows


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """`dtype` of activations; `weight_dtype` is what a few rows are multiplied with."""

    dtype: str
    weight_dtype: str
    own_values: bool  # use the folder's 4- and 8-bit values instead of making new ones
    low_bit_kernels: bool  # False: rounded weights are multiplied as floats
    compiled: bool  # the project's own kernels take few rows; False: those of torch
    device: str
    notices: tuple[str, ...] = ()

    @property
    def requantizes(self) -> bool:
        return self.weight_dtype in ("int4", "int8") and not self.own_values


def plan_weights(*, dtype: str, weight_dtype: str, device: str, has_own_values: bool) -> WeightPlan:
    """What `auto` means, and what must be said about a choice that changes the weights."""
    kernels = dtype == "bf16" and torch.device(device).type == "cpu"
    own = has_own_values and kernels and weight_dtype in ("auto", "int4")
    if weight_dtype == "auto":
        weight_dtype = "int4" if own else dtype
    plan = WeightPlan(dtype, weight_dtype, own, kernels, kernels and library.available(), device)
    return replace(plan, notices=tuple(_notices(plan)))


def _notices(plan: WeightPlan) -> list[str]:
    dtype, weight_dtype = plan.dtype, plan.weight_dtype
    notices = []
    if weight_dtype == "int8":
        notices.append("weight_dtype int8: the weights are requantised to 8 bits with one scale a row.")
    if weight_dtype == "int4" and plan.requantizes:
        notices.append(
            f"weight_dtype int4: the weights are requantised to 4 bits in groups of {GROUP_SIZE}, "
            f"the output head to 8 bits."
        )
    if weight_dtype in ("int4", "int8") and not plan.low_bit_kernels:
        notices.append(
            f"weight_dtype {weight_dtype} needs a CPU and dtype bf16 to save time or memory; "
            f"here its rounded weights are multiplied in {dtype}."
        )
    if weight_dtype == "bf16" and dtype != "bf16":
        notices.append(f"weight_dtype bf16: the weights are rounded to bf16 and multiplied in {dtype}.")
    return notices


class LinearLoader:
    def __init__(self, files: WeightFiles, quantized: QuantizedFiles, plan: WeightPlan) -> None:
        self._files = files
        self._quantized = quantized
        self._plan = plan
        self._dtype = TORCH_DTYPES[plan.dtype]
        self._not_packed: list[str] = []

    def notices(self) -> tuple[str, ...]:
        if not self._not_packed:
            return ()
        return (
            f"{len(self._not_packed)} weights, such as {self._not_packed[0]!r}, have no 4-bit form that the kernel "
            f"takes; they are multiplied in {self._plan.dtype}.",
        )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def unread(self) -> list[str]:
        return self._files.unread()

    def vector(self, name: str) -> Tensor:
        return self._files.read(name).to(self._plan.device, self._dtype)

    def linear(self, modules: Sequence[str]) -> Linear:
        """One product for several projections of the same input, rows in the order given."""
        names = [f"{module}.weight" for module in modules]
        bias = None
        if f"{modules[0]}.bias" in self._files:
            bias = torch.cat([self.vector(f"{module}.bias") for module in modules])
        if self._plan.requantizes:
            return self._requantized(names, bias, self._plan.weight_dtype)
        if self._plan.weight_dtype == "int4":
            return self._mixed(self._own_four_bit(names), PlainLinear(self._stacked(names), bias))
        return self._float(names, bias)

    def head(self, name: str, embedding: Tensor | None) -> Linear:
        """The output head; of a tied model it is the embedding, of which no second copy is kept."""
        if self._plan.requantizes:
            return self._requantized([name], None, "int8")
        if embedding is not None and self._plan.weight_dtype in (self._plan.dtype, "int4"):
            plain = PlainLinear(embedding)
        elif self._plan.weight_dtype == "int4":
            plain = PlainLinear(self._stacked([name]))
        else:
            return self._float([name], None)
        if not self._plan.own_values:
            return plain
        own = self._own_eight_bit(name)
        if own is None:
            return self._mixed(self._own_four_bit([name]), plain)
        return self._mixed(own, plain)

    # ------------------------------------------------------------------------------------------------ forms

    def _mixed(self, weight: LowBit | None, plain: PlainLinear) -> Linear:
        if weight is None or not self._plan.low_bit_kernels:
            return plain
        packed = _kernel_form(weight, plain.bias) if self._plan.compiled else None
        if packed is not None:
            return KernelLinear(packed, plain)
        match weight:
            case FourBitWeight():
                return MixedLinear(pack_four_bit(weight), plain)
            case EightBitWeight():
                return MixedLinear(pack_eight_bit(weight), plain, MAX_NIBBLE_PAIR_ROWS)
            case Int8Rows():
                return MixedLinear(weight, plain)

    def _float(self, names: Sequence[str], bias: Tensor | None) -> Linear:
        if self._plan.weight_dtype == "fp32" and self._plan.dtype != "fp32":
            return WideLinear(self._stacked(names, torch.float32), bias)
        if self._plan.weight_dtype == "bf16":
            return PlainLinear(self._stacked(names, torch.bfloat16).to(self._dtype), bias)
        return PlainLinear(self._stacked(names), bias)

    def _requantized(self, names: Sequence[str], bias: Tensor | None, weight_dtype: str) -> Linear:
        """Both forms hold the rounded weights, so that an answer doesn't depend on how many rows a step has."""
        weight = self._stacked(names, torch.float32)
        if weight_dtype == "int8":
            rows = quantize_to_int8(weight)
            return self._mixed(rows, PlainLinear(rows.dequantize().to(self._dtype), bias))
        if not can_pack(*weight.shape):
            self._not_packed.append(names[0])
            return PlainLinear(weight.to(self._dtype), bias)
        groups = quantize_to_int4(weight)
        return self._mixed(groups, PlainLinear(groups.dequantize().to(self._dtype), bias))

    def _stacked(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        """Filled part by part: the file's data type is never held twice."""
        parts = [self._files.read(name) for name in names]
        num_rows = sum(part.shape[0] for part in parts)
        stacked = torch.empty(num_rows, parts[0].shape[1], dtype=dtype or self._dtype, device=self._plan.device)
        row = 0
        for part in parts:
            stacked[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return stacked

    # ------------------------------------------------------------------------------- a GGUF's own values

    def _own_four_bit(self, names: Sequence[str]) -> FourBitWeight | None:
        parts = [part for part in map(self._quantized.four_bit, names) if part is not None]
        if len(parts) < len(names):
            self._not_packed.append(names[0])
            return None
        for name, part in zip(names, parts, strict=True):
            rows = slice(NUM_CHECKED_ROWS)
            self._check(name, FourBitWeight(part.values[rows], part.scale[rows], part.minimum[rows]).dequantize())
        stacked = stack_rows(parts)
        if not can_pack(*stacked.values.shape):
            self._not_packed.append(names[0])
            return None
        return stacked

    def _own_eight_bit(self, name: str) -> EightBitWeight | None:
        own = self._quantized.eight_bit(name)
        if own is None or not can_pack(*own.values.shape):
            return None
        rows = slice(NUM_CHECKED_ROWS)
        self._check(name, EightBitWeight(own.values[rows], own.scale[rows]).dequantize())
        return own

    def _check(self, name: str, rows: Tensor) -> None:
        floats = self._files.read(name)[:NUM_CHECKED_ROWS].float()
        if not torch.allclose(rows, floats, rtol=2**-7, atol=1e-3 * float(floats.abs().max())):
            raise ModelLoadError(
                f"quantized.safetensors and the floats beside it disagree about {name!r}: they aren't of one model. "
                f"Delete the folder and convert the model again."
            )


def _kernel_form(weight: LowBit, bias: Tensor | None) -> PackedMatrix | None:
    """The same values and scales for the compiled kernel; None if its fp16 scales can't hold these."""
    match weight:
        case FourBitWeight(values, scale, minimum):
            d, m = scale.half(), minimum.half()
            exact = torch.equal(d.float(), scale.float()) and torch.equal(m.float(), minimum.float())
            return PackedMatrix.pack(WeightKind.Q4, values, d=d, m=m, bias=bias) if exact else None
        case EightBitWeight(values, scale):
            d = scale.half()
            exact = torch.equal(d.float(), scale.float())
            return PackedMatrix.pack(WeightKind.Q8, values, d=d, bias=bias) if exact else None
        case Int8Rows(values, scale):
            d = scale.half()
            if not PackedMatrix.fits(*values.shape) or not torch.equal(d.float(), scale.float()):
                return None
            groups = d.unsqueeze(1).expand(-1, values.shape[1] // GROUP_SIZE)
            return PackedMatrix.pack(WeightKind.Q8, values, d=groups, bias=bias)
