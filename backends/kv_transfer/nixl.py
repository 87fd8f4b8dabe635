"""KV memory reached by NIXL (`nixl`): vLLM's and Dynamo's transfer library, here over UCX.

The decode side registers its pool with an agent and tells its metadata and address; the prefill side writes runs of
blocks there. Both sides may keep KV on the CPU (verified) or on a CUDA device (same calls with VRAM; unverified, no GPU
was at hand). Registering makes no page resident on one host; over RDMA it makes all of them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from backends.kv_transfer.base import Connect, KVConnector, KVLayout, KVMemory
from backends.kv_transfer.cuda_marks import mark_computed, wait_computed
from backends.kv_transfer.nixl_agent import Descriptors, MemoryKind, NixlAgent
from backends.kv_transfer.nixl_connection import Connection, MakeAgent, attempt
from backends.kv_transfer.pages import Prefaulter
from backends.kv_transfer.part_cache import PartCache
from backends.kv_transfer.runs import Run
from backends.protocol.messages import Pair

PROBE_SECONDS = 5.0  # for the first write to a new peer, which makes the connection


class Place(msgspec.Struct, frozen=True):
    """Where registered memory is: `Pair.kv_memory_metadata`."""

    agent: bytes
    kind: MemoryKind
    address: int
    device: int
    probe: int  # address of a few bytes that a new peer may write to


class NixlKVMemory(KVMemory):
    """A decode side's pool, registered under a name that no earlier process had."""

    backend = "nixl"

    def __init__(
        self, pool: Tensor, *, prefaulter: Prefaulter | None = None, make_agent: MakeAgent = NixlAgent
    ) -> None:
        """`pool` is all of it as bytes; it must outlive this."""
        self._pool = pool
        self._prefaulter = prefaulter
        self.num_bytes = pool.nbytes
        kind = memory_kind(pool)
        self._agent = make_agent(_unique_name("decode"), kind)
        self._probe = torch.zeros(64, dtype=torch.uint8, device=pool.device)
        self._regions = [
            self._agent.register(kind, tensor.data_ptr(), tensor.nbytes, _device_number(tensor))
            for tensor in (pool, self._probe)
        ]
        place = Place(self._agent.metadata(), kind, pool.data_ptr(), _device_number(pool), self._probe.data_ptr())
        self.metadata = msgspec.msgpack.encode(place)

    @override
    def prefault(self, block_ids: Sequence[int]) -> None:
        if self._prefaulter is not None:
            self._prefaulter.prefault(block_ids)

    @override
    def close(self) -> None:
        if self._prefaulter is not None:
            self._prefaulter.close()
        while self._regions:
            attempt(self._agent.deregister, self._regions.pop())


class NixlSource:
    """A prefill side's cache, registered once; makes connectors into the memories of its peers."""

    def __init__(self, cache: Tensor, *, block_size: int, make_agent: MakeAgent = NixlAgent) -> None:
        """`cache` is [num_layers, 2, num_blocks, bytes_per_block], as bytes."""
        self.cache = cache
        self.block_size = block_size
        self.kind = memory_kind(cache)
        self.device = _device_number(cache)
        self.agent = make_agent(_unique_name("prefill"), self.kind)
        self.agent.register(self.kind, cache.data_ptr(), cache.nbytes, self.device)

    def connect(self, pair: Pair, _fd: int | None) -> KVConnector:
        """Raises OSError or ValueError if the memory can't be reached."""
        try:
            place = msgspec.msgpack.decode(pair.kv_memory_metadata, type=Place)
        except msgspec.MsgspecError as error:
            raise ValueError(f"its nixl metadata can't be read: {error}") from error
        num_layers, _, _, bytes_per_block = self.cache.shape
        layout = KVLayout(num_layers, pair.kv_memory_bytes // (num_layers * 2 * bytes_per_block), bytes_per_block)
        connector = NixlConnector(self, place, layout, timeout_seconds=pair.lease_seconds)
        try:
            connector.probe()
        except OSError:
            connector.close()
            raise
        return connector


class NixlConnector(KVConnector):
    """Writes into one peer's memory. After a failure the next write connects anew."""

    def __init__(self, source: NixlSource, place: Place, layout: KVLayout, *, timeout_seconds: float) -> None:
        self._source = source
        self._place = place
        self._layout = layout
        self._timeout_seconds = timeout_seconds
        self._parts: PartCache[_Pieces] = PartCache(source.block_size, self._pieces)
        self._bytes_per_slot = layout.bytes_per_block // source.block_size
        self._lock = threading.Lock()
        self._connection = Connection(source.agent, place.agent)

    @property
    @override
    def num_layers(self) -> int:
        return self._layout.num_layers

    def probe(self) -> None:
        """A write of no consequence: whether the peer's memory can be reached at all."""
        source = np.array([(self._source.cache.data_ptr(), 8, self._source.device)], dtype=np.uint64)
        target = np.array([(self._place.probe, 8, self._place.device)], dtype=np.uint64)
        self._write(source, target, min(PROBE_SECONDS, self._timeout_seconds))

    @override
    def mark(self) -> object | None:
        return mark_computed(self._source.cache.device)

    @override
    def wait_for(self, mark: object) -> None:
        wait_computed(mark)

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        pieces = self._parts.plan(source_block_ids, target_block_ids, start, stop)
        num_source_blocks = int(self._source.cache.shape[2])
        self._write(
            self._descriptors(layer, pieces.source, num_source_blocks, pieces.sizes, self._source.device),
            self._descriptors(layer, pieces.target, self._layout.num_blocks, pieces.sizes, self._place.device),
            self._timeout_seconds,
        )
        return 2 * (stop - start) * self._bytes_per_slot

    @override
    def close(self) -> None:
        """Let go of the peer. The own cache stays registered, for the next one."""
        self._connection.end()

    def _write(self, source: Descriptors, target: Descriptors, timeout_seconds: float) -> None:
        with self._lock:
            if self._connection.gone.is_set():
                self._connection.end()
                self._connection = Connection(self._source.agent, self._place.agent)
            connection = self._connection
        connection.write((self._source.kind, source), (self._place.kind, target), timeout_seconds)

    def _pieces(self, runs: list[Run]) -> _Pieces:
        pieces = [self._pieces_of(run) for run in runs]
        return _Pieces(*(np.concatenate(column) for column in zip(*pieces, strict=True)))

    def _pieces_of(self, run: Run) -> _Pieces:
        """Where the run is in the first layer's K, on both sides."""
        size, first = self._layout.bytes_per_block, run.first_slot * self._bytes_per_slot
        length, num_pieces = run.end_slot * self._bytes_per_slot - first, run.num_blocks
        if (run.source_step, run.target_step) == (1, 1):
            length, num_pieces = length + (run.num_blocks - 1) * size, 1
        steps = np.arange(num_pieces, dtype=np.int64)
        source = self._source.cache.data_ptr() + (run.source + steps * run.source_step) * size + first
        target = self._place.address + (run.target + steps * run.target_step) * size + first
        return _Pieces(source, target, np.full(num_pieces, length, dtype=np.int64))

    def _descriptors(
        self, layer: int, addresses: _Numbers, num_blocks: int, sizes: _Numbers, device: int
    ) -> Descriptors:
        """The pieces in a layer's K and V."""
        region = num_blocks * self._layout.bytes_per_block
        both = np.concatenate([addresses + layer * 2 * region, addresses + (layer * 2 + 1) * region])
        rows = np.empty((len(both), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = both, np.tile(sizes, 2), device
        return rows


_Numbers = NDArray[np.int64]


class _Pieces(NamedTuple):
    """Runs of bytes."""

    source: _Numbers  # addresses
    target: _Numbers
    sizes: _Numbers


def nixl_connect(cache: Tensor, block_size: int) -> Connect:
    return NixlSource(cache, block_size=block_size).connect


def memory_kind(tensor: Tensor) -> MemoryKind:
    return "DRAM" if tensor.device.type == "cpu" else "VRAM"


def _device_number(tensor: Tensor) -> int:
    return tensor.device.index or 0


def _unique_name(role: str) -> str:
    """No peer may take a new process for an old one it knew."""
    return f"kvgate-{role}-{os.getpid()}-{secrets.token_hex(8)}"
