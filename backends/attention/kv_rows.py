"""How one token's key or value of one KV head lies in the cache, and writing it there. Knows no blocks, no requests.

A row is head_dim elements in a float type; or, in int8, head_dim values and behind them the four bytes of the fp32
scale they share. With the scale in the row, a slot stays one run of bytes: whoever copies slots or blocks takes the
scales along, and a kernel finds values and scale in the same cache line. fp32, since fp16 would lose the scale of small
keys (below 6e-5) to save two bytes in 68.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.native import library
from backends.native.library import SCALE_BYTES

MAX_VALUE = 127  # -128 is not used: symmetric
_LEAST = 1e-30  # magnitudes below it become zero; their reciprocal would overflow


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def write_rows(slots: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """rows [n, num_kv_heads, head_dim] into `slots` [num_slots, num_kv_heads, row] of one layer's keys or values."""
    if slots.dtype != torch.int8:
        slots.index_copy_(0, slot_mapping, rows.to(slots.dtype))
    elif slots.device.type == "cpu" and rows.dtype in library.ROW_DTYPES and library.available():
        library.store_slots(slots, slot_mapping, rows)
    else:
        slots.index_copy_(0, slot_mapping, encode_int8(rows))


def encode_int8(rows: Tensor) -> Tensor:
    """[..., head_dim] -> int8 [..., head_dim + 4]: the greatest magnitude of each row becomes 127."""
    rows = rows.float()
    most = rows.abs().amax(-1, keepdim=True)
    by = torch.where((most > _LEAST) & most.isfinite(), MAX_VALUE / most, 0.0)
    values = (rows * by).nan_to_num_(0.0).round_().to(torch.int8)
    scale = (most / MAX_VALUE).view(torch.int8)
    return torch.cat((values, scale), dim=-1)


def decode_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as they lie in the cache -> [..., head_dim] in a float type."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-SCALE_BYTES] * scale).to(dtype)
