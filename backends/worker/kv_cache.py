"""The memory of the paged KV cache: how large, where, and in which layout. Knows nothing of who owns which block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.attention.kv_rows import row_width
from backends.config import EngineConfig
from backends.core.errors import PoolTooSmall
from backends.models.dtypes import TORCH_DTYPES
from backends.models.spec import ModelSpec

DEFAULT_CPU_KV_GIB = 1.0
KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8}


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """All blocks of all layers; a slot is `block_id * block_size + offset`.

    Fresh memory is not initialised: on a CPU it costs nothing until it is written.
    """

    # [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, row]: a row is head_dim elements; in int8 it is
    # head_dim values and the four bytes of their scale, so that one block stays one run of bytes per layer and K or V
    tensor: Tensor

    @classmethod
    def allocate(
        cls, spec: ModelSpec, num_blocks: int, block_size: int, dtype: str = "auto", device: str | None = None
    ) -> PagedKVCache:
        shape = _shape(spec, num_blocks, block_size, dtype)
        return cls(torch.empty(shape, dtype=torch_kv_dtype(spec, dtype), device=device or spec.device))

    @classmethod
    def from_bytes(
        cls, memory: Tensor, spec: ModelSpec, num_blocks: int, block_size: int, dtype: str = "auto"
    ) -> PagedKVCache:
        """Over bytes that somebody else owns, such as a mapping shared by two processes. They must outlive this."""
        flat = memory.view(torch_kv_dtype(spec, dtype))
        return cls(flat.view(_shape(spec, num_blocks, block_size, dtype)))

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[2]

    @property
    def block_size(self) -> int:
        return self.tensor.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def bytes_per_block(self) -> int:
        return self.tensor.nbytes // self.num_blocks


def _shape(spec: ModelSpec, num_blocks: int, block_size: int, dtype: str) -> tuple[int, ...]:
    row = row_width(spec.head_dim, torch_kv_dtype(spec, dtype))
    return (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, row)


def effective_kv_dtype(spec: ModelSpec, dtype: str) -> str:
    """`auto` is the data type of the activations: `choose_kv_dtype` was asked before, where memory counts."""
    return spec.dtype if dtype == "auto" else dtype


def torch_kv_dtype(spec: ModelSpec, dtype: str) -> torch.dtype:
    return KV_DTYPES[effective_kv_dtype(spec, dtype)]


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "auto") -> int:
    """Scales included."""
    kind = torch_kv_dtype(spec, dtype)
    return spec.num_layers * 2 * spec.num_kv_heads * row_width(spec.head_dim, kind) * kind.itemsize


def choose_kv_dtype(config: EngineConfig, spec: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """What `auto` means here, and what must be said about it; any other name stays.

    The activations' data type; int8 where the pool would then hold less than one request of the whole context. A pool
    given in blocks holds the same number of tokens in every data type, so int8 would gain nothing.
    """
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype, ()
    num_bytes = _pool_bytes(config)
    if config.auto_kv_dtype_gib is not None:
        num_bytes = min(num_bytes, int(config.auto_kv_dtype_gib * 2**30))
    num_tokens = num_bytes // kv_bytes_per_token(spec, spec.dtype)
    if config.num_kv_blocks is not None or num_tokens >= spec.max_model_len:
        return spec.dtype, ()
    return "int8", (
        f"kv_cache_dtype auto: int8 is used, since a pool of {num_bytes / 2**30:.3g} GiB in {spec.dtype} would hold "
        f"{num_tokens} tokens, less than the context of {spec.max_model_len}. For {spec.dtype}, set kv_cache_dtype or "
        f"raise kv_cache_gib.",
    )


def num_blocks_for(config: EngineConfig, spec: ModelSpec) -> int:
    """Size of the pool. `num_kv_blocks` wins over `kv_cache_gib`, that over the device's default.

    Raises PoolTooSmall, naming the settings, if not one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    bytes_per_block = kv_bytes_per_token(spec, config.kv_cache_dtype) * config.block_size
    num_bytes = _pool_bytes(config)
    if num_bytes < bytes_per_block:
        raise PoolTooSmall(
            f"The KV pool may take {num_bytes / 2**20:.1f} MiB, but one block of {config.block_size} tokens takes "
            f"{bytes_per_block / 2**20:.1f} MiB. Raise kv_cache_gib (or gpu_memory_utilization), or set num_kv_blocks."
        )
    return num_bytes // bytes_per_block


def _pool_bytes(config: EngineConfig) -> int:
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    if torch.device(config.device).type != "cuda":
        return int(DEFAULT_CPU_KV_GIB * 2**30)
    # weights are loaded by now: what is free, less the share of the device that is to stay free
    free, total = torch.cuda.mem_get_info(config.device)
    return max(0, free - int(total * (1 - config.gpu_memory_utilization)))
