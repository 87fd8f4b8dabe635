"""A small pool in bytes, and a NIXL agent that writes by itself, without the library."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from backends.kv_transfer.base import KVLayout, TransferError
from backends.kv_transfer.nixl_agent import Descriptors, MemoryKind
from backends.protocol.messages import EngineInfo, Pair

BLOCK_SIZE, SLOT_BYTES = 4, 3
LAYOUT = KVLayout(num_layers=2, num_blocks=10, bytes_per_block=BLOCK_SIZE * SLOT_BYTES)
NUM_SOURCE_BLOCKS = 12

Copy = tuple[list[int], list[int], int, int]  # block ids of source and target, first token, end


def make_cache() -> Tensor:
    shape = (LAYOUT.num_layers, 2, NUM_SOURCE_BLOCKS, LAYOUT.bytes_per_block)
    return torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def as_blocks(pool: Tensor) -> Tensor:
    return pool.view(LAYOUT.num_layers, 2, LAYOUT.num_blocks, LAYOUT.bytes_per_block)


@st.composite
def some_copies(draw: st.DrawFn) -> Copy:
    """Blocks in any order, in that of the memory, or against it, for which there are ways of their own."""
    num_blocks = draw(st.integers(1, 9))
    source_ids = list(draw(st.permutations(range(NUM_SOURCE_BLOCKS))))[:num_blocks]
    target_ids = list(draw(st.permutations(range(LAYOUT.num_blocks))))[:num_blocks]
    order = draw(st.sampled_from(["as drawn", "upwards", "against each other", "downwards"]))
    if order != "as drawn":
        source_ids.sort(reverse=order == "downwards")
        target_ids.sort(reverse=order != "upwards")
    start = draw(st.integers(0, num_blocks * BLOCK_SIZE - 1))
    return source_ids, target_ids, start, draw(st.integers(start + 1, num_blocks * BLOCK_SIZE))


def copied(
    target: Tensor, cache: Tensor, layer: int, source_ids: list[int], target_ids: list[int], start: int, stop: int
) -> Tensor:
    """The target, slot by slot, as a right copy leaves it."""
    expected = target.clone()
    for token in range(start, stop):
        block, slot = divmod(token, BLOCK_SIZE)
        part = slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)
        expected[layer, :, target_ids[block], part] = cache[layer, :, source_ids[block], part]
    return expected


def make_pair(backend: str, metadata: bytes, *, num_bytes: int = LAYOUT.num_bytes, lease_seconds: float = 5.0) -> Pair:
    values: dict[str, Any] = dict.fromkeys(("pid", "max_model_len", "vocab_size", "num_blocks", "num_threads"), 1)
    names = ("served_name", "model_path", "model_fingerprint", "kv_cache_dtype", "weight_dtype", "device")
    values |= dict.fromkeys(names, "x")
    return Pair(
        info=EngineInfo(role="decode", block_size=BLOCK_SIZE, kv_bytes_per_token=1, **values),
        kv_memory_bytes=num_bytes,
        transfer_backend=backend,
        kv_memory_metadata=metadata,
        lease_seconds=lease_seconds,
    )


class ScriptedAgent:
    """Keeps what was registered in a list that all agents share, and writes by memmove."""

    registered: ClassVar[list[tuple[str, int, int]]] = []  # agent, address, bytes
    names: ClassVar[list[str]] = []

    def __init__(self, name: str, kind: MemoryKind) -> None:
        assert kind == "DRAM"
        self.name = name
        self.disconnected: list[str] = []
        self.num_writes = 0
        self.fail: TransferError | None = None
        self.before_write: Any = lambda: None
        ScriptedAgent.names.append(name)

    def register(self, kind: MemoryKind, address: int, num_bytes: int, device: int) -> Any:
        region = (self.name, address, num_bytes)
        ScriptedAgent.registered.append(region)
        return region

    def deregister(self, regions: Any) -> None:
        ScriptedAgent.registered.remove(regions)

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes) -> Any:
        name = metadata.decode()
        if not any(owner == name for owner, _, _ in ScriptedAgent.registered):
            raise TransferError(f"nixl could not load the peer's metadata: {name} is unknown")
        return name

    def disconnect(self, peer: Any) -> None:
        self.disconnected.append(peer)

    def write(
        self,
        peer: Any,
        source: tuple[MemoryKind, Descriptors],
        target: tuple[MemoryKind, Descriptors],
        *,
        timeout_seconds: float,
        gone: threading.Event,
    ) -> None:
        self.before_write()
        if self.fail is not None:
            raise self.fail
        for (from_, size, _), (to, to_size, _) in zip(source[1].tolist(), target[1].tolist(), strict=True):
            assert size == to_size
            self._check(self.name, from_, size)
            self._check(peer, to, size)
            ctypes.memmove(to, from_, size)
        self.num_writes += 1

    @staticmethod
    def _check(owner: str, address: int, size: int) -> None:
        regions = [(first, num) for name, first, num in ScriptedAgent.registered if name == owner]
        assert any(first <= address and address + size <= first + num for first, num in regions)
