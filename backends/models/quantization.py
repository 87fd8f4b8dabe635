"""Weights in groups of few bits: their values, their exact meaning, and the packed forms CPU kernels read.

A group is 32 neighbouring weights of a row. No models, no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
_ROWS_PACKED_AT_ONCE = 4096  # a multiple of the kernel's 64


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """w = values * scale + minimum, as a GGUF's Q4_0 and Q4_1 have it."""

    values: Tensor  # uint8 [out, in], 0..15
    scale: Tensor  # [out, in / 32]
    minimum: Tensor  # [out, in / 32]

    def dequantize(self) -> Tensor:
        return _by_group(self.values.float(), self.scale.float(), self.minimum.float())


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    """w = values * scale, as a GGUF's Q8_0 has it."""

    values: Tensor  # int8 [out, in]
    scale: Tensor  # [out, in / 32]

    def dequantize(self) -> Tensor:
        return _by_group(self.values.float(), self.scale.float(), None)


def _by_group(values: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
    grouped = values.view(values.shape[0], -1, GROUP_SIZE) * scale.unsqueeze(-1)
    if minimum is not None:
        grouped += minimum.unsqueeze(-1)
    return grouped.flatten(1)


def stack_rows(weights: list[FourBitWeight]) -> FourBitWeight:
    """One matrix of several with the same input, as for a fused projection."""
    return FourBitWeight(
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scale for weight in weights]),
        torch.cat([weight.minimum for weight in weights]),
    )


def can_pack(out_features: int, in_features: int) -> bool:
    """The int4 kernel takes rows by 16 and groups of 32."""
    return out_features % 16 == 0 and in_features % GROUP_SIZE == 0


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """Input of `_weight_int4pack_mm_for_cpu`, whose w = (values - 8) * scale + zero, with scales in bf16."""

    packed: Tensor
    scales_and_zeros: Tensor  # bf16 [in / 32, out, 2]

    def matmul(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP_SIZE, self.scales_and_zeros)
        return result


def _pack_values(values: Tensor) -> Tensor:
    """[out, in] of 0..15 -> the kernel's own order of uint8 [out, in / 2].

    Some rows at a time, as the operation wants 32 bits a value: whole blocks of the kernel, whose bytes don't depend on
    the other rows.
    """
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int(), 1)
        for rows in torch.split(values, _ROWS_PACKED_AT_ONCE)
    ]
    return torch.cat(packed)


def _pack(values: Tensor, scale: Tensor, zero: Tensor) -> PackedInt4:
    scales_and_zeros = torch.stack((scale, zero), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
    return PackedInt4(_pack_values(values), scales_and_zeros)


def pack_four_bit(weight: FourBitWeight) -> PackedInt4:
    """The same 4-bit values; only scale and zero are rounded, to bf16."""
    scale = weight.scale.float()
    return _pack(weight.values, scale, weight.minimum.float() + 8 * scale)


@dataclass(frozen=True, slots=True)
class PackedNibblePair:
    """8-bit values as two 4-bit matrices side by side: 16 * high + low, exactly.

    The int8 kernel of torch has one scale a row, so it would have to requantise; the int4 kernel keeps the groups.
    """

    pair: PackedInt4

    def matmul(self, x: Tensor) -> Tensor:
        return self.pair.matmul(torch.cat((x, x), dim=1))


def pack_eight_bit(weight: EightBitWeight) -> PackedNibblePair:
    """values + 128 = 16 * high + low, so w = 16 * scale * (high - 8) + scale * (low - 8) + 8 * scale."""
    shifted = weight.values.view(torch.uint8) ^ 128  # values + 128, in 8 bits
    scale = weight.scale.to(torch.bfloat16).float()
    values = torch.cat((shifted >> 4, shifted & 15), dim=1)
    zeros = torch.cat((torch.zeros_like(scale), 8 * scale), dim=1)
    return PackedNibblePair(_pack(values, torch.cat((16 * scale, scale), dim=1), zeros))


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Input of `_weight_int8pack_mm`: one scale a row."""

    values: Tensor  # int8 [out, in]
    scale: Tensor  # bf16 [out]

    def matmul(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scale)
        return result

    def dequantize(self) -> Tensor:
        return self.values.float() * self.scale.float().unsqueeze(1)


def quantize_to_int8(weight: Tensor) -> Int8Rows:
    """Nearest values with one symmetric scale a row."""
    weight = weight.float()
    scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-8).to(torch.bfloat16)
    values = (weight / scale.float().unsqueeze(1)).round().clamp(-127, 127)
    return Int8Rows(values.to(torch.int8), scale)


def quantize_to_int4(weight: Tensor) -> FourBitWeight:
    """Nearest of 16 evenly spaced values between the least and the greatest weight of each group."""
    grouped = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    minimum = grouped.amin(dim=-1).half().float()  # fp16, as a GGUF has them, before the values are chosen
    scale = ((grouped.amax(dim=-1) - minimum) / 15).clamp_min(1e-7).half().float()
    values = ((grouped - minimum.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, 15)
    return FourBitWeight(values.to(torch.uint8).flatten(1), scale, minimum)
