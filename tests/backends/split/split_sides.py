"""A decode and a prefill engine each by itself, with a scripted model over real shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scripted_kv import BLOCK_SIZE, BYTES_PER_BLOCK, NUM_LAYERS, SLOT, VOCAB_SIZE, ScriptedRunner
from typing_extensions import override

from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.scheduler import Scheduler
from backends.engines.outputs import OutputProcessor
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import PrefillEngine
from backends.engines.split.prefill_report import PrefillReports
from backends.engines.stats import MemoryReading
from backends.engines.stepper import Stepper
from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.shared_memory import CacheBytes, SharedKVMemory, SharedMemoryConnector
from backends.protocol.messages import (
    EngineInfo,
    FromEngine,
    Pair,
    Role,
    TransferMode,
)


class ScriptedDetokenizer:
    """Each token is its number and a comma."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._text = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        self._text += f"{token_id},"
        self.matched_stop = next((stop for stop in self._stop if stop in self._text), None)
        return "" if self.matched_stop else f"{token_id},"

    def finish(self) -> str:
        return ""


class ScriptedMemory:
    def read(self) -> MemoryReading:
        return MemoryReading(memory_bytes=1, peak_memory_bytes=2)

    def reset_peak(self) -> None:
        pass


class ScriptedConnector(SharedMemoryConnector):
    """A real connector that asks before each copy."""

    def __init__(self, source: CacheBytes, memory: SharedKVMemory, before_copy: Callable[[], None]) -> None:
        super().__init__(source, memory, block_size=BLOCK_SIZE)
        self._before_copy = before_copy

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        self._before_copy()
        return super().save_kv_layer(layer, source_block_ids, target_block_ids, start, stop)


def make_info(role: Role, num_blocks: int, **changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "role": role,
        "pid": 1,
        "served_name": "m",
        "model_path": "m",
        "model_fingerprint": "weights-1",
        "max_model_len": 1000,
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "kv_cache_dtype": "fp32",
        "kv_bytes_per_token": NUM_LAYERS * 2 * SLOT.size,
        "weight_dtype": "fp32",
        "device": "cpu",
        "num_threads": 1,
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]


def make_scheduler(num_blocks: int, *, max_num_seqs: int, chunk: int, max_waiting: int = 1000) -> Scheduler:
    manager = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_cache=True)
    return Scheduler(
        manager,
        max_batched_tokens=64,
        prefill_chunk_tokens=chunk,
        prefill_token_ratio=1.0,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )


class DecodeDouble:
    """A decode engine with a scripted runner over shared memory."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_waiting: int,
        chunk: int,
        transfer_mode: TransferMode,
        timeout_seconds: float,
        clock: Callable[[], float],
        make_runner: Callable[[CacheBytes], ScriptedRunner],
    ) -> None:
        self.emitted: list[FromEngine] = []
        self.prefaulted: list[int] = []
        self.memory = SharedKVMemory.create(NUM_LAYERS * 2 * num_blocks * BYTES_PER_BLOCK)
        cache = np.frombuffer(self.memory.buffer, dtype=np.uint8).reshape(NUM_LAYERS, 2, num_blocks, -1)
        self.runner = make_runner(cache)
        self.scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs, chunk=chunk)
        self.reports = PrefillReports()
        outputs = OutputProcessor(
            role="decode",
            detokenizer_factory=lambda request: ScriptedDetokenizer(request.sampling.stop),
            emit=self.emitted.append,
            max_num_tokens=self.scheduler.max_request_tokens,
            peak_memory_bytes=lambda: 3,
            complete_timings=self.reports.complete_timings,
        )
        self.engine = DecodeEngine(
            info=make_info("decode", num_blocks),
            scheduler=self.scheduler,
            stepper=Stepper(self.scheduler, self.runner, clock=clock),
            outputs=outputs,
            reports=self.reports,
            memory=ScriptedMemory(),
            kv_memory=self.memory,
            emit=self.emitted.append,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            transfer_mode=transfer_mode,
            handoff_timeout_seconds=timeout_seconds,
            clock=clock,
        )


class PrefillDouble:
    """A prefill engine with a scripted runner over its own memory."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        chunk: int,
        max_in_flight: int,
        wake: Callable[[], None],
        before_copy: Callable[[], None],
        make_runner: Callable[[CacheBytes], ScriptedRunner],
    ) -> None:
        self._before_copy = before_copy
        self.cache = np.zeros((NUM_LAYERS, 2, num_blocks, BYTES_PER_BLOCK), dtype=np.uint8)
        self.runner = make_runner(self.cache)
        self.scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs, chunk=chunk)
        self.engine = PrefillEngine(
            info=make_info("prefill", num_blocks),
            scheduler=self.scheduler,
            stepper=Stepper(self.scheduler, self.runner),
            memory=ScriptedMemory(),
            connect=self._connect,
            max_transfer_concurrency=max_in_flight,
            wake=wake,
        )

    def _connect(self, pair: Pair, fd: int | None) -> KVConnector:
        assert fd is not None
        return ScriptedConnector(self.cache, SharedKVMemory.attach(fd, pair.kv_memory_bytes), self._before_copy)
