"""Puts the real parts of either side together. Importing this loads torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from backends.config import EngineConfig
from backends.engines.base import Emit
from backends.engines.build import build_parts
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import PrefillEngine
from backends.engines.split.prefill_report import PrefillReports
from backends.kv_transfer.base import KVLayout, KVMemory
from backends.kv_transfer.pages import num_blocks_ahead
from backends.kv_transfer.registry import make_connect, make_pool, unfit
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
    """Load a model and make a decode side, its KV pool in memory that peers reach. Takes seconds."""
    _check_backend(config)
    shared: list[KVMemory] = []

    def share(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> PagedKVCache:
        layout = _kv_layout(config, spec, num_blocks)
        ahead = num_blocks_ahead(layout, -(-spec.max_model_len // config.block_size))
        memory, pool = make_pool(config.transfer_backend, layout, device=config.device, num_blocks_ahead=ahead)
        shared.append(memory)
        return PagedKVCache.from_bytes(pool, spec, num_blocks, config.block_size, config.kv_cache_dtype)

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
        lease_seconds=config.lease_seconds,
    )
    return BuiltDecode(engine, parts.codec, parts.info)


def build_prefill(config: EngineConfig, wake: Callable[[], None]) -> BuiltPrefill:
    """Load a model and make a prefill side. Takes seconds. `wake` must let the engine step; any thread may call it."""
    _check_backend(config)
    # The decode side's queue is the bounded one; what it sends on has its blocks reserved already.
    parts = build_parts(msgspec.structs.replace(config, max_waiting=UNBOUNDED), "prefill")
    engine = PrefillEngine(
        info=parts.info,
        scheduler=parts.scheduler,
        stepper=parts.stepper,
        memory=parts.memory,
        connect=make_connect(config.transfer_backend, cache_bytes(parts.kv_cache), config.block_size),
        max_transfer_concurrency=config.max_transfer_concurrency,
        transfer_backend=config.transfer_backend,
        wake=wake,
    )
    return BuiltPrefill(engine, parts.info)


def cache_bytes(kv_cache: PagedKVCache) -> Tensor:
    """The cache's own memory as the bytes of a `KVLayout`, whatever its data type."""
    view = kv_cache.tensor.view(torch.uint8)
    return view.view(*view.shape[:3], -1)


def _kv_layout(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> KVLayout:
    bytes_per_token = kv_bytes_per_token(spec, config.kv_cache_dtype)
    return KVLayout(spec.num_layers, num_blocks, config.block_size * bytes_per_token // (2 * spec.num_layers))


def _check_backend(config: EngineConfig) -> None:
    reason = unfit(config.transfer_backend, config.device)
    if reason is not None:
        raise ModelLoadError(reason)
