"""One matrix product with a weight, by whichever form of it is fastest for the number of rows. No layers.

On a CPU, few rows are bound by reading the weight, so 4 or 8 bits win; many rows are bound by arithmetic, where the
bf16 instructions win. `MixedLinear` keeps both forms of the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from backends.native import library
from backends.native.library import MAX_ROWS, PackedMatrix, WeightKind

# Measured on two cores with AVX-512 BF16: at 16 rows the low-bit kernels and bf16 take the same time, at 8 half of it.
MAX_LOW_BIT_ROWS = 12
MAX_NIBBLE_PAIR_ROWS = 6  # twice the products, so bf16 catches up earlier


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], in the data type of x."""


class LowBitWeight(Protocol):
    def matmul(self, x: Tensor) -> Tensor:
        """x bf16 [rows, in] -> bf16 [rows, out]"""


@dataclass(frozen=True, slots=True)
class PlainLinear(Linear):
    """A weight in the activations' data type."""

    weight: Tensor
    bias: Tensor | None = None
    step_form: PackedMatrix | None = None

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class WideLinear(Linear):
    """A weight kept in fp32 under narrower activations."""

    weight: Tensor
    bias: Tensor | None = None
    step_form: PackedMatrix | None = None

    @override
    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight, bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class MixedLinear(Linear):
    """Low-bit for few rows, plain for many; both hold the same weight up to rounding in bf16."""

    few_rows: LowBitWeight
    many_rows: PlainLinear
    max_few_rows: int = MAX_LOW_BIT_ROWS

    @override
    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.max_few_rows:
            return self.many_rows(x)
        out = self.few_rows.matmul(x.contiguous())
        bias = self.many_rows.bias
        return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class KernelLinear(Linear):
    """The compiled kernel for few rows, torch for many; both hold the same weight up to rounding in bf16."""

    packed: PackedMatrix  # bias included
    many_rows: PlainLinear
    max_few_rows: int = MAX_ROWS

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return self.many_rows(x) if x.shape[0] > self.max_few_rows else self.few_rows(x)

    def few_rows(self, x: Tensor) -> Tensor:
        """The kernel takes MAX_ROWS at a time, and reads the weight again for each part."""
        parts = [
            self.packed.product(part, num_threads=torch.get_num_threads()) for part in torch.split(x.float(), MAX_ROWS)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(x.dtype)


_STEP_KINDS = {torch.bfloat16: WeightKind.BF16, torch.float32: WeightKind.FP32}


def step_form(linear: Linear) -> PackedMatrix | None:
    """What the compiled decode step multiplies with; None if it takes no such weight.

    For a weight that isn't rounded it is a second copy, which only a process that decodes needs.
    """
    if isinstance(linear, KernelLinear):
        return linear.packed
    if not isinstance(linear, PlainLinear | WideLinear):
        return None
    if linear.step_form is not None:
        return linear.step_form
    kind = _STEP_KINDS.get(linear.weight.dtype)
    if kind is None or not PackedMatrix.fits(*linear.weight.shape):
        return None
    return PackedMatrix.pack(kind, linear.weight, bias=linear.bias)


def with_step_form(linear: Linear) -> Linear:
    """The same with that copy beside it: for a file, where whoever doesn't read it doesn't have it in memory."""
    if isinstance(linear, PlainLinear | WideLinear) and library.available():
        return replace(linear, step_form=step_form(linear))
    return linear
