"""KV memory that two processes of one host share: the prefill side copies straight into the decode side's blocks.

The memory has no name in the file system: it lives as long as a descriptor or a map of it, so nothing is left behind
however its owners end. Knows nothing of torch; caches are seen as bytes `[num_layers, 2, num_blocks, bytes_per_block]`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from backends.kv_transfer.base import KVConnector, runs

CacheBytes = NDArray[np.uint8]  # [num_layers, 2, num_blocks, bytes_per_block]


def _anonymous_file() -> int:
    """A descriptor of memory without a name; an unlinked temporary file where the system has no memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvgate-kv", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="kvgate-kv-") as file:
        return os.dup(file.fileno())


class SharedKVMemory:
    """A map of shared memory. The side that made it keeps its descriptor, to hand it to peers as they come."""

    def __init__(self, buffer: mmap.mmap, *, fd: int = -1) -> None:
        self.buffer = buffer
        self.fd = fd  # -1: not ours, or closed
        self.num_bytes = len(buffer)

    @classmethod
    def create(cls, num_bytes: int) -> SharedKVMemory:
        """New zeroed memory; pages take room only once they are written."""
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, num_bytes)
            return cls(mmap.mmap(fd, num_bytes), fd=fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> SharedKVMemory:
        """Map what a peer made. The descriptor stays the caller's; the map doesn't need it afterwards."""
        size = os.fstat(fd).st_size
        if size < num_bytes:  # touching pages beyond the end would kill this process
            raise ValueError(f"The peer's KV memory has {size} bytes; {num_bytes} were announced.")
        return cls(mmap.mmap(fd, num_bytes))

    def close(self) -> None:
        """Give the memory back. Arrays that still look into it keep the map alive until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self.buffer.close()


class SharedMemoryConnector(KVConnector):
    """Copies between the own cache and a peer's mapped one: one copy, no staging, the interpreter lock released."""

    def __init__(self, source: CacheBytes, memory: SharedKVMemory, *, block_size: int) -> None:
        num_layers, _, _, bytes_per_block = source.shape
        self._source = source
        self._memory = memory
        self._target = np.frombuffer(memory.buffer, dtype=np.uint8).reshape(num_layers, 2, -1, bytes_per_block)
        self._block_size = block_size
        self._bytes_per_slot = int(bytes_per_block) // block_size

    @property
    @override
    def num_layers(self) -> int:
        return int(self._source.shape[0])

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        source, target = self._source[layer], self._target[layer]
        for run in runs(source_block_ids, target_block_ids, start, stop, self._block_size):
            part = slice(run.first_slot * self._bytes_per_slot, run.end_slot * self._bytes_per_slot)
            blocks = source[:, _every(run.source, run.source_step, run.num_blocks), part]
            target[:, _every(run.target, run.target_step, run.num_blocks), part] = blocks  # K and V at once
        return 2 * (stop - start) * self._bytes_per_slot

    @override
    def close(self) -> None:
        del self._target
        self._memory.close()


def _every(first: int, step: int, num: int) -> slice:
    stop = first + num * step
    return slice(first, stop if stop >= 0 else None, step)
