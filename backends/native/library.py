"""The kernels as Python functions over torch tensors. Shapes and layouts are those of kernels.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from backends.native.build import BuildFailed, library_path

MAX_ROWS = 8
MAX_HEAD_DIM = 256
MAX_GROUP = 128
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of what is written into a cache
SCALE_BYTES = 4  # behind the values of an int8 row of the cache


class WeightKind(IntEnum):
    BF16 = 0
    Q4 = 1  # uint8 values 0..15 with fp16 scale and minimum per 32 inputs
    Q8 = 2  # int8 values with fp16 scale per 32 inputs
    FP32 = 3


class CMatrix(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("out", c_int32), ("in_", c_int32), ("kind", c_int32),
                ("unused", c_int32)]  # fmt: skip


class CLayer(Structure):
    _fields_ = [("input_norm", c_void_p), ("post_norm", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
                ("qkv", CMatrix), ("output", CMatrix), ("gate_up", CMatrix), ("down", CMatrix),
                ("window", c_int32), ("unused", c_int32), ("key_sizes", c_void_p)]  # fmt: skip


class CModel(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate",
                                       "vocab", "block_size", "kv_dtype", "unused")),
        ("eps", c_float), ("scale", c_float),
        ("layer_stride", c_int64), ("value_offset", c_int64), ("slot_stride", c_int64),
        ("cache", c_void_p), ("final_norm", c_void_p),
        ("head", CMatrix), ("layers", POINTER(CLayer)),
    ]  # fmt: skip


@cache
def load() -> ctypes.CDLL | BuildFailed:
    """The library, or why there is none. torch must be loaded first: both then share one OpenMP runtime."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except (BuildFailed, OSError) as error:
        return error if isinstance(error, BuildFailed) else BuildFailed(str(error))
    library.packed_bytes.restype = c_int64
    library.dense_step_scratch.restype = c_int64
    library.paged_attention_scratch.restype = c_int64
    library.pack_matrix.argtypes = [c_int, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p]
    library.dense_step_scratch.argtypes = [POINTER(CModel), c_int, c_void_p]
    library.dense_step.argtypes = [POINTER(CModel), c_int, *[c_void_p] * 6, c_int, c_void_p, c_void_p, c_int]
    library.rms_norm_rows.argtypes = [c_void_p, c_void_p, c_int, c_int, c_float, c_void_p, c_int]
    library.silu_mul_rows.argtypes = [c_void_p, c_int, c_int, c_void_p, c_int]
    library.rotate_rows.argtypes = [c_void_p, c_void_p, c_float, c_void_p, c_void_p, *[c_int] * 5]
    library.paged_prefill_scratch.restype = c_int64
    library.paged_prefill.argtypes = [
        c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_void_p, *[c_int] * 6, c_float, c_int, c_void_p, c_int,
    ]  # fmt: skip
    library.store_slots.argtypes = [
        c_void_p, c_int, c_int64, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_int64, c_int,
    ]  # fmt: skip
    library.copy_pieces.restype = None
    library.copy_pieces.argtypes = [c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_int64, c_int64]
    library.matrix_product.argtypes = [POINTER(CMatrix), c_int, c_void_p, c_void_p, c_int]
    library.paged_attention.argtypes = [
        c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_void_p, c_int, c_void_p, c_void_p,
        c_int, c_int, c_int, c_int, c_int, c_float, c_float, c_void_p, c_int,
    ]  # fmt: skip
    return library


def available() -> bool:
    return isinstance(load(), ctypes.CDLL)


def loaded_from() -> Path | None:
    library = load()
    return None if isinstance(library, BuildFailed) else Path(library._name)


def unavailable_reason() -> str | None:
    library = load()
    return str(library) if isinstance(library, BuildFailed) else None


def _library() -> ctypes.CDLL:
    library = load()
    if isinstance(library, BuildFailed):
        raise library
    return library


class PackedMatrix:
    """A weight matrix [out, in] in the kernels' layout. `out` must be a multiple of 16, `in` of 32."""

    def __init__(
        self, kind: WeightKind, data: Tensor, out_features: int, in_features: int, bias: Tensor | None
    ) -> None:
        if data.numel() != _library().packed_bytes(kind, out_features, in_features):
            raise ValueError(f"{data.numel()} bytes aren't a matrix of {out_features} x {in_features}.")
        self.kind = kind
        self.out_features = out_features
        self.in_features = in_features
        self.data = data  # uint8, from a cache line's begin on
        self.bias = bias  # fp32

    @staticmethod
    def fits(out_features: int, in_features: int) -> bool:
        return out_features % 16 == 0 and in_features % 32 == 0

    @classmethod
    def pack(
        cls,
        kind: WeightKind,
        values: Tensor,
        *,
        d: Tensor | None = None,
        m: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> PackedMatrix:
        """values [out, in]: bf16, fp32, uint8 (Q4) or int8 (Q8); d, m: fp16 [out, in / 32]."""
        out_features, in_features = values.shape
        if not cls.fits(out_features, in_features):
            raise ValueError(f"A matrix of {out_features} x {in_features} is not a multiple of 16 x 32.")
        library = _library()
        data = _aligned(library.packed_bytes(kind, out_features, in_features))
        values = values.contiguous()
        d, m = (None if scales is None else scales.contiguous() for scales in (d, m))
        library.pack_matrix(
            kind, out_features, in_features, _pointer(values), _pointer(d), _pointer(m), data.data_ptr()
        )
        return cls(kind, data, out_features, in_features, None if bias is None else bias.float().contiguous())

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def descriptor(self) -> CMatrix:
        """The kernels' view; valid while this object lives."""
        return CMatrix(self.data.data_ptr(), _pointer(self.bias), self.out_features, self.in_features, self.kind, 0)

    def product(self, rows: Tensor, *, num_threads: int) -> Tensor:
        """fp32 [n, in] -> fp32 [n, out], n <= MAX_ROWS."""
        out = torch.empty(rows.shape[0], self.out_features)
        descriptor = self.descriptor()
        code = _library().matrix_product(
            byref(descriptor), rows.shape[0], rows.contiguous().data_ptr(), out.data_ptr(), num_threads
        )
        if code:
            raise ValueError(f"{rows.shape[0]} rows; the kernel takes 1 to {MAX_ROWS}.")
        return out


def _aligned(num_bytes: int) -> Tensor:
    """Uninitialised bytes that start at a cache line."""
    raw = torch.empty(num_bytes + 64, dtype=torch.uint8)
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + num_bytes]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one decode step: each is the next token of its request."""

    hidden: Tensor  # fp32 [rows, hidden], the embedded tokens; overwritten
    cos: Tensor  # fp32 [rows, head_dim]
    sin: Tensor  # fp32 [rows, head_dim]
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int64 [rows], where each row's own key and value go
    block_tables: Tensor  # int32 [rows, width]


class DenseStep:
    """A decode step of one model over one KV cache. Keeps the tensors it points at alive."""

    def __init__(self, model: CModel, keep: Sequence[object]) -> None:
        self._model = model
        self._keep = keep
        self._library = _library()

    def first_layer(self, kv: Tensor) -> DenseStep:
        """A step of the first layer alone over another cache of the same data type, with the first 16 logits."""
        model = CModel.from_buffer_copy(self._model)
        model.num_layers, model.vocab, model.block_size = 1, 16, kv.shape[3]
        model.cache, model.layer_stride, model.value_offset = kv.data_ptr(), kv.stride(0), kv.stride(1)
        return DenseStep(model, [kv, self._keep])

    def run(self, rows: StepRows, *, num_threads: int) -> Tensor:
        """Logits fp32 [rows, vocab]; at most MAX_ROWS rows. Their keys and values are then in the cache."""
        num_rows = rows.hidden.shape[0]
        scratch_bytes = self._library.dense_step_scratch(byref(self._model), num_rows, rows.positions.data_ptr())
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        logits = torch.empty(num_rows, self._model.vocab)
        inputs = (rows.hidden, rows.cos, rows.sin, rows.positions, rows.slots, rows.block_tables)
        assert all(tensor.is_contiguous() for tensor in inputs)
        code = self._library.dense_step(
            byref(self._model), num_rows, *(tensor.data_ptr() for tensor in inputs), rows.block_tables.shape[1],
            logits.data_ptr(), scratch.data_ptr(), num_threads,
        )  # fmt: skip
        assert code == 0, "the sizes were checked when the step was built"
        return logits


def paged_attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    block_tables: Tensor,
    spans: tuple[Tensor, Tensor],
    *,
    scale: float,
    softcap: float = 0.0,
    num_threads: int,
) -> Tensor:
    """Attention of single query rows [rows, heads, head_dim] (fp32 or bf16) over one layer's paged cache.

    cache: keys and values, [blocks, block_size, kv_heads, row], a row being head_dim floats, or int8 values and their
    scale; block_tables int32 [rows, width]; spans: first
    and last, int32 [rows]: row r sees the keys at positions [first[r], last[r]), at least one.
    """
    library = _library()
    (key_cache, value_cache), (first, last) = cache, spans
    rows, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    longest = int((last - first).max())
    scratch = torch.empty(library.paged_attention_scratch(rows, heads, head_dim, longest), dtype=torch.uint8)
    code = library.paged_attention(
        query.data_ptr(), DTYPES[query.dtype], out.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        DTYPES[key_cache.dtype], key_cache.stride(1), block_tables.data_ptr(), block_tables.shape[1],
        first.data_ptr(), last.data_ptr(), rows, heads, kv_heads, head_dim, block_size, scale, softcap,
        scratch.data_ptr(), num_threads,
    )  # fmt: skip
    if code:
        raise ValueError(f"head_dim {head_dim} or {heads // kv_heads} heads a KV head are more than the kernel takes.")
    return out


def can_prefill(query: Tensor, key_cache: Tensor) -> bool:
    """Whether `paged_prefill` takes these."""
    sizes_fit = query.shape[-1] % 32 == 0 and query.shape[-1] <= MAX_HEAD_DIM
    types_fit = query.dtype == torch.bfloat16 and key_cache.dtype in (torch.bfloat16, torch.int8)
    return sizes_fit and types_fit and available() and _library().paged_prefill_scratch(0, 1, 1, 32, 0) > 0


def paged_prefill(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    block_table: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    num_threads: int,
) -> Tensor:
    """Attention of a prompt chunk bf16 [tokens, heads, head_dim], at positions from `start` on.

    cache: one layer's keys and values, [blocks, block_size, kv_heads, row] in bf16 or int8, the chunk's own included;
    block_table int32 [width] of the request; a token sees the `window` positions up to its own, or all.
    """
    library = _library()
    key_cache, value_cache = cache
    num_tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    query = query.contiguous()
    out = torch.empty_like(query)
    scratch = _aligned(library.paged_prefill_scratch(start, num_tokens, kv_heads, head_dim, window or 0))
    code = library.paged_prefill(
        query.data_ptr(), out.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        DTYPES[key_cache.dtype], key_cache.stride(1), block_table.data_ptr(), start, num_tokens, heads, kv_heads,
        head_dim, block_size, scale, window or 0,
        scratch.data_ptr(), num_threads,
    )  # fmt: skip
    if code:
        raise ValueError("paged_prefill takes bf16 (an int8 cache), head_dim a multiple of 32, AVX-512 with bf16.")
    return out


def store_slots(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write float rows [n, kv_heads, head_dim] into slots int64 [n] of one layer's keys or values.

    cache: [num_slots, kv_heads, row], int8 values with their scale, or any float type.
    """
    num_rows, kv_heads, head_dim = rows.shape
    if rows.stride()[1:] != (head_dim, 1):
        rows = rows.contiguous()
    _library().store_slots(
        rows.data_ptr(), DTYPES[rows.dtype], rows.stride(0), num_rows, kv_heads, head_dim, slots.data_ptr(),
        cache.data_ptr(), DTYPES[cache.dtype], cache.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n], weight [n] -> like x; all bf16."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _library().rms_norm_rows(
        x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def silu_mul_rows(gate_up: Tensor) -> Tensor:
    """bf16 [rows, 2 * n], gates first -> silu(gate) * up, bf16 [rows, n]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    _library().silu_mul_rows(gate_up.data_ptr(), rows, width // 2, out.data_ptr(), torch.get_num_threads())
    return out


def rotate_rows(
    heads: Tensor, num_rotated: int, rotation: tuple[Tensor, Tensor], norm: Tensor | None, eps: float
) -> None:
    """Norm (bf16 [num_rotated, head_dim], or not) and rotate the first heads of bf16 [rows, heads, head_dim] in place.

    rotation: cos and sin, fp32 [rows, head_dim]. head_dim is at most MAX_HEAD_DIM.
    """
    assert heads.is_contiguous()
    cos, sin = rotation
    rows, all_heads, head_dim = heads.shape
    code = _library().rotate_rows(
        heads.data_ptr(), _pointer(norm), eps, cos.data_ptr(), sin.data_ptr(), rows, all_heads, num_rotated, head_dim,
        torch.get_num_threads(),
    )  # fmt: skip
    if code:
        raise ValueError(f"head_dim {head_dim} is more than the kernel takes.")
