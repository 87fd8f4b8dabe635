"""The memory of the paged KV cache: how large, where, and in which layout. Knows nothing of who owns which block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Buffer

from backends.config import EngineConfig
from backends.models.dtypes import TORCH_DTYPES
from backends.models.spec import ModelSpec

DEFAULT_CPU_KV_GIB = 1.0


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """All blocks of all layers; a slot is `block_id * block_size + offset`.

    Fresh memory is not initialised: on a CPU it costs nothing until it is written.
    """

    tensor: Tensor  # [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim]

    @classmethod
    def allocate(
        cls, spec: ModelSpec, num_blocks: int, block_size: int, dtype: str = "auto", device: str | None = None
    ) -> PagedKVCache:
        shape = _shape(spec, num_blocks, block_size)
        return cls(torch.empty(shape, dtype=torch_kv_dtype(spec, dtype), device=device or spec.device))

    @classmethod
    def from_buffer(
        cls, buffer: Buffer, spec: ModelSpec, num_blocks: int, block_size: int, dtype: str = "auto"
    ) -> PagedKVCache:
        """Over memory that somebody else owns, such as a mapping shared by two processes. It must outlive this."""
        shape = _shape(spec, num_blocks, block_size)
        flat = torch.frombuffer(buffer, dtype=torch_kv_dtype(spec, dtype), count=torch.Size(shape).numel())
        return cls(flat.view(shape))

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


def _shape(spec: ModelSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)


def effective_kv_dtype(spec: ModelSpec, dtype: str) -> str:
    """`auto` is the data type of the activations."""
    return spec.dtype if dtype == "auto" else dtype


def torch_kv_dtype(spec: ModelSpec, dtype: str) -> torch.dtype:
    return TORCH_DTYPES[effective_kv_dtype(spec, dtype)]


def kv_bytes_per_token(spec: ModelSpec, dtype: str = "auto") -> int:
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * torch_kv_dtype(spec, dtype).itemsize


def num_blocks_for(config: EngineConfig, spec: ModelSpec) -> int:
    """Size of the pool. `num_kv_blocks` wins over `kv_cache_gib`, that over the device's default.

    Raises ValueError, naming the settings, if not one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    bytes_per_block = kv_bytes_per_token(spec, config.kv_cache_dtype) * config.block_size
    num_bytes = _pool_bytes(config)
    if num_bytes < bytes_per_block:
        raise ValueError(
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
