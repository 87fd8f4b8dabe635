"""KV memory on a CUDA device that two processes of one host share (`cuda_ipc`).

The decode side exports its pool by torch's own inter-process handles; the prefill side opens them and copies from
device to device. Unverified on a GPU: none was at hand, so `CudaSharing` and `CudaCopies` have only been stood in for.
Both processes must see the devices under the same numbers (the same CUDA_VISIBLE_DEVICES), and torch keeps a counter of
handles in a small file in /dev/shm, which a killed decode side leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from backends.kv_transfer.base import Connect, KVConnector, KVMemory, TransferError
from backends.kv_transfer.cuda_marks import mark_computed, wait_computed
from backends.kv_transfer.part_cache import PartCache
from backends.kv_transfer.runs import Run
from backends.protocol.messages import Pair


class Sharing(Protocol):
    """How device memory travels to another process."""

    def export(self, memory: Tensor) -> bytes: ...

    def open(self, metadata: bytes) -> Tensor:
        """The same memory, as bytes."""


class Copies(Protocol):
    """Where copies run."""

    def run(self, copy: Callable[[], None]) -> None:
        """Do what `copy` queues beside the computing, and return once it is done."""


class CudaSharing(Sharing):
    """By torch: the handle of the allocation, where in it the memory is, and an event that the opener waits for."""

    @override
    def export(self, memory: Tensor) -> bytes:
        shared: tuple[Any, ...] = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return msgspec.msgpack.encode((memory.storage_offset(), memory.nbytes, *shared))

    @override
    def open(self, metadata: bytes) -> Tensor:
        offset, num_bytes, *shared = msgspec.msgpack.decode(metadata)
        storage = torch.UntypedStorage._new_shared_cuda(*shared)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return memory.set_(storage, offset, (num_bytes,), (1,))


class CudaCopies(Copies):
    """On a stream of its own, so that copies and the computing of the next layer run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def run(self, copy: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy()
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()


class CudaKVMemory(KVMemory):
    """A decode side's pool on a device, where it is resident from the start."""

    backend = "cuda_ipc"

    def __init__(self, pool: Tensor, *, sharing: Sharing | None = None) -> None:
        """`pool` is all of it as bytes; peers may use it until the process ends."""
        self._pool: Tensor | None = pool
        self.num_bytes = pool.nbytes
        self.metadata = (sharing or CudaSharing()).export(pool)

    @override
    def close(self) -> None:
        self._pool = None


class CudaConnector(KVConnector):
    """Copies between the own cache and a peer's, both on devices of this host."""

    def __init__(self, source: Tensor, target: Tensor, copies: Copies, *, block_size: int) -> None:
        """Both are [num_layers, 2, num_blocks, bytes_per_block], as bytes."""
        self._source = source
        self._target: Tensor | None = target
        self._copies = copies
        self._bytes_per_slot = source.shape[3] // block_size
        self._parts: PartCache[list[Run]] = PartCache(block_size, lambda runs: runs)

    @property
    @override
    def num_layers(self) -> int:
        return self._source.shape[0]

    @override
    def mark(self) -> object | None:
        return mark_computed(self._source.device)

    @override
    def wait_for(self, mark: object) -> None:
        wait_computed(mark)

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        runs = self._parts.plan(source_block_ids, target_block_ids, start, stop)
        target = self._target
        assert target is not None

        def copy() -> None:
            for run in runs:
                self._copy(self._source[layer], target[layer], run)

        try:
            self._copies.run(copy)
        except RuntimeError as error:  # torch's, of a device in trouble
            raise TransferError(f"the device could not copy: {error}") from error
        return 2 * (stop - start) * self._bytes_per_slot

    @override
    def close(self) -> None:
        self._target = None

    def _copy(self, source: Tensor, target: Tensor, run: Run) -> None:
        part = slice(run.first_slot * self._bytes_per_slot, run.end_slot * self._bytes_per_slot)
        if (run.source_step, run.target_step) == (1, 1):
            blocks = source[:, run.source : run.source + run.num_blocks, part]
            target[:, run.target : run.target + run.num_blocks, part].copy_(blocks, non_blocking=True)
            return
        steps = torch.arange(run.num_blocks)
        taken = source.index_select(1, (run.source + steps * run.source_step).to(source.device))[:, :, part]
        put_at = (run.target + steps * run.target_step).to(target.device)
        target.index_copy_(1, put_at, taken.to(target.device, non_blocking=True))  # whole blocks: steps are of such


def cuda_connect(cache: Tensor, block_size: int, *, sharing: Sharing | None = None) -> Connect:
    """`cache` is [num_layers, 2, num_blocks, bytes_per_block], as bytes."""
    known = sharing or CudaSharing()

    def connect(pair: Pair, _fd: int | None) -> KVConnector:
        num_layers, _, _, bytes_per_block = cache.shape
        try:
            memory = known.open(pair.kv_memory_metadata)
        except (RuntimeError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"its CUDA memory can't be opened: {error}") from error
        if memory.nbytes != pair.kv_memory_bytes:
            raise ValueError(f"its CUDA memory has {memory.nbytes} bytes; {pair.kv_memory_bytes} were announced")
        target = memory.view(num_layers, 2, -1, bytes_per_block)
        return CudaConnector(cache, target, copies_on(cache.device), block_size=block_size)

    return connect


class _HostCopies(Copies):
    """A CPU copies as it is told."""

    @override
    def run(self, copy: Callable[[], None]) -> None:
        copy()


def copies_on(device: torch.device) -> Copies:
    return CudaCopies(device) if device.type == "cuda" else _HostCopies()
