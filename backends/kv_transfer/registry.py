"""The ways by which KV can move, by name: what each runs on, whether it can be used here, how both sides are made."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.kv_transfer import nixl_agent
from backends.kv_transfer.base import Connect, KVConnector, KVLayout, KVMemory
from backends.kv_transfer.cuda_ipc import CudaKVMemory, cuda_connect
from backends.kv_transfer.nixl import NixlKVMemory, nixl_connect
from backends.kv_transfer.pages import Prefaulter
from backends.kv_transfer.shared_memory import SharedKVMemory, local_connect
from backends.protocol.messages import Pair, TransferBackend

Pool = tuple[KVMemory, Tensor]  # what peers reach, and all of it as bytes


@dataclass(frozen=True, slots=True)
class Backend:
    device_kinds: tuple[str, ...]  # "cpu", "cuda"
    missing: Callable[[], str | None]
    make_pool: Callable[[KVLayout, str, int], Pool]  # layout, device, blocks to keep resident ahead
    make_connect: Callable[[Tensor, int], Connect]  # cache, block size


def unfit(backend: TransferBackend, device: str) -> str | None:
    """Why this backend can't move KV of that device here, and what to do; None if it can."""
    kind = device.partition(":")[0]
    if kind in BACKENDS[backend].device_kinds:
        return BACKENDS[backend].missing()
    fit = [repr(name) for name, known in BACKENDS.items() if kind in known.device_kinds]
    instead = f"transfer_backend {' or '.join(fit)}" if fit else "the merged engine"
    return f"transfer_backend {backend!r} does not move KV of device {device!r}. Use {instead} there."


def available(backend: TransferBackend) -> str | None:
    """Why this backend can't be used on any device here, and what to do; None if it can."""
    return BACKENDS[backend].missing()


def make_pool(backend: TransferBackend, layout: KVLayout, *, device: str, num_blocks_ahead: int = 0) -> Pool:
    """A decode side's KV memory. `num_blocks_ahead` blocks are kept resident ahead of those in use, on a CPU."""
    return BACKENDS[backend].make_pool(layout, device, num_blocks_ahead)


def make_connect(backend: TransferBackend, cache: Tensor, block_size: int) -> Connect:
    """For a prefill side whose cache, as bytes, is [num_layers, 2, num_blocks, bytes_per_block].

    What it returns refuses a decode side of another backend by name.
    """
    connect = BACKENDS[backend].make_connect(cache, block_size)

    def connect_same(pair: Pair, fd: int | None) -> KVConnector:
        if pair.transfer_backend != backend:
            raise ValueError(
                f"transfer_backend differs: the decode instance has {pair.transfer_backend!r}, "
                f"the prefill instance {backend!r}"
            )
        return connect(pair, fd)

    return connect_same


def _local_pool(layout: KVLayout, _device: str, num_blocks_ahead: int) -> Pool:
    memory = SharedKVMemory.create_for(layout, num_blocks_ahead=num_blocks_ahead)
    return memory, torch.frombuffer(memory.buffer, dtype=torch.uint8)


def _nixl_pool(layout: KVLayout, device: str, num_blocks_ahead: int) -> Pool:
    if not device.startswith("cpu"):
        on_device = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        return NixlKVMemory(on_device), on_device
    buffer = mmap.mmap(-1, layout.num_bytes)  # pages of its own, which take room only once they are written
    pool = torch.frombuffer(buffer, dtype=torch.uint8)
    prefaulter = Prefaulter(buffer, layout, num_blocks_ahead=num_blocks_ahead)
    try:
        return NixlKVMemory(pool, prefaulter=prefaulter), pool
    except BaseException:
        prefaulter.close()
        raise


def _cuda_pool(layout: KVLayout, device: str, _num_blocks_ahead: int) -> Pool:
    pool = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    return CudaKVMemory(pool), pool


def _local_connect(cache: Tensor, block_size: int) -> Connect:
    return local_connect(cache.numpy(), block_size)


BACKENDS: dict[TransferBackend, Backend] = {
    "local": Backend(("cpu",), lambda: None, _local_pool, _local_connect),
    "nixl": Backend(("cpu", "cuda"), nixl_agent.missing, _nixl_pool, nixl_connect),
    "cuda_ipc": Backend(("cuda",), lambda: None, _cuda_pool, cuda_connect),
}
