"""Puts the real parts of either side together. Importing this loads torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from backends.config import EngineConfig
from backends.engines.base import Emit
from backends.engines.build import build_parts
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import Connect, PrefillEngine
from backends.engines.split.prefill_report import PrefillReports
from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.shared_memory import CacheBytes, SharedKVMemory, SharedMemoryConnector
from backends.models.spec import ModelLoadError, ModelSpec
from backends.protocol.messages import EngineInfo
from backends.text.tokenizer import TextCodec
from backends.worker.kv_cache import PagedKVCache, kv_bytes_per_token

UNBOUNDED = 1 << 31


@dataclass(frozen=True, slots=True)
class BuiltDecode:
    engine: DecodeEngine
    codec: TextCodec
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class BuiltPrefill:
    engine: PrefillEngine
    info: EngineInfo


def build_decode(config: EngineConfig, emit: Emit) -> BuiltDecode:
    """Load a model and make a decode side, its KV pool in shared memory. Takes seconds."""
    _check_device(config)
    shared: list[SharedKVMemory] = []

    def share(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> PagedKVCache:
        num_bytes = num_blocks * config.block_size * kv_bytes_per_token(spec, config.kv_cache_dtype)
        memory = SharedKVMemory.create(num_bytes)
        shared.append(memory)
        return PagedKVCache.from_buffer(memory.buffer, spec, num_blocks, config.block_size, config.kv_cache_dtype)

    parts = build_parts(config, "decode", share)
    (kv_memory,) = shared
    reports = PrefillReports()
    engine = DecodeEngine(
        info=parts.info,
        scheduler=parts.scheduler,
        stepper=parts.stepper,
        outputs=parts.output_processor(emit, reports.complete_timings),
        reports=reports,
        memory=parts.memory,
        kv_memory=kv_memory,
        emit=emit,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        transfer_mode=config.transfer_mode,
        handoff_timeout_seconds=config.handoff_timeout_seconds,
    )
    return BuiltDecode(engine, parts.codec, parts.info)


def build_prefill(config: EngineConfig, wake: Callable[[], None]) -> BuiltPrefill:
    """Load a model and make a prefill side. Takes seconds. `wake` must let the engine step; any thread may call it."""
    _check_device(config)
    # The decode side's queue is the bounded one; what it sends on has its blocks reserved already.
    parts = build_parts(msgspec.structs.replace(config, max_waiting=UNBOUNDED), "prefill")
    engine = PrefillEngine(
        info=parts.info,
        scheduler=parts.scheduler,
        stepper=parts.stepper,
        memory=parts.memory,
        connect=connect_shared_memory(parts.kv_cache),
        max_transfer_concurrency=config.max_transfer_concurrency,
        wake=wake,
    )
    return BuiltPrefill(engine, parts.info)


def connect_shared_memory(kv_cache: PagedKVCache) -> Connect:
    source = cache_bytes(kv_cache)

    def connect(fd: int, num_bytes: int) -> KVConnector:
        return SharedMemoryConnector(source, SharedKVMemory.attach(fd, num_bytes), block_size=kv_cache.block_size)

    return connect


def cache_bytes(kv_cache: PagedKVCache) -> CacheBytes:
    """The cache's own memory as bytes, whatever its data type."""
    view: CacheBytes = kv_cache.tensor.view(torch.uint8).numpy()
    return view.reshape(*view.shape[:3], -1)


def _check_device(config: EngineConfig) -> None:
    if torch.device(config.device).type != "cpu":
        raise ModelLoadError(
            f"The split engine moves KV through this host's memory and runs on device 'cpu', not {config.device!r}. "
            "Use the merged engine on that device."
        )
