"""What a dense layer does to rows between its products: norms, rotation, gating. With torch, or compiled for bf16.

Torch computes a bf16 norm as eight passes over memory; a compiled one is one, and together they are a third of a
prompt chunk's time.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from backends.native import library

Rotation = tuple[Tensor, Tensor]  # cos and sin of a step's rows, in the form its RowOps wants


class RowOps(Protocol):
    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of [rows, n]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * n], gates first -> [rows, n]; may overwrite its input."""

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """cos, sin fp32 [rows, head_dim / 2]"""

    def rotate(self, heads: Tensor, num_rotated: int, rotation: Rotation, norm: Tensor | None) -> Tensor:
        """The first heads of [rows, heads, head_dim], normed if the family does and rotated; may overwrite them.

        (a, b) -> (a cos - b sin, b cos + a sin) of each head's two halves.
        """


def row_ops(like: Tensor, *, head_dim: int, eps: float) -> RowOps:
    """The faster way for weights like this one."""
    fits = like.dtype == torch.bfloat16 and like.device.type == "cpu" and head_dim <= library.MAX_HEAD_DIM
    return CompiledRowOps(eps) if fits and library.available() else TorchRowOps(like.dtype, eps)


class TorchRowOps(RowOps):
    def __init__(self, dtype: torch.dtype, eps: float) -> None:
        self._dtype = dtype
        self._eps = eps

    @override
    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    @override
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @override
    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """[rows, 1, head_dim]; the sine with the sign of its half."""
        cosines, signed_sines = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
        return cosines.to(self._dtype).unsqueeze(1), signed_sines.to(self._dtype).unsqueeze(1)

    @override
    def rotate(self, heads: Tensor, num_rotated: int, rotation: Rotation, norm: Tensor | None) -> Tensor:
        cos, signed_sin = rotation
        rotated = heads[:, :num_rotated]
        if norm is not None:
            rotated = F.rms_norm(rotated, rotated.shape[-1:], None, self._eps) * norm
        swapped = rotated.roll(rotated.shape[-1] // 2, -1)
        return torch.addcmul(rotated * cos, swapped, signed_sin)


class CompiledRowOps(RowOps):
    """bf16 in and out, fp32 inside."""

    def __init__(self, eps: float) -> None:
        self._eps = eps

    @override
    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return library.rms_norm_rows(x, weight, self._eps)

    @override
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return library.silu_mul_rows(gate_up)

    @override
    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)

    @override
    def rotate(self, heads: Tensor, num_rotated: int, rotation: Rotation, norm: Tensor | None) -> Tensor:
        library.rotate_rows(heads, num_rotated, rotation, norm, self._eps)
        return heads[:, :num_rotated]
