"""The snapshot every engine gives of itself. Knows neither devices nor sockets."""

from __future__ import annotations

from typing import Protocol

import msgspec

from backends.core.scheduler import Scheduler
from backends.engines.stepper import Stepper
from backends.protocol.messages import EngineStats


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the process holds now: resident on a CPU, allocated on CUDA; and the most since the peak was reset."""

    memory_bytes: int = 0
    shared_memory_bytes: int = 0  # the part of it of which other processes may hold the same pages
    peak_memory_bytes: int = 0
    cuda_allocated_bytes: int = 0
    cuda_reserved_bytes: int = 0
    cuda_device_used_bytes: int = 0


class MemoryProbe(Protocol):
    def read(self) -> MemoryReading: ...

    def reset_peak(self) -> None: ...


def engine_stats(
    scheduler: Scheduler,
    stepper: Stepper,
    memory: MemoryProbe,
    *,
    num_generated_tokens: int,
    transferred_bytes: int = 0,
) -> EngineStats:
    pool = scheduler.manager.pool
    reading = memory.read()
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_blocks=pool.num_blocks,
        num_blocks_in_use=pool.num_blocks_in_use,
        num_blocks_cached=pool.num_cached_blocks,
        peak_blocks_in_use=pool.peak_blocks_in_use,
        memory_bytes=reading.memory_bytes,
        shared_memory_bytes=reading.shared_memory_bytes,
        peak_memory_bytes=reading.peak_memory_bytes,
        cuda_allocated_bytes=reading.cuda_allocated_bytes,
        cuda_reserved_bytes=reading.cuda_reserved_bytes,
        cuda_device_used_bytes=reading.cuda_device_used_bytes,
        num_preemptions=scheduler.num_preemptions,
        num_steps=stepper.num_steps,
        prefix_query_tokens=scheduler.manager.prefix_query_tokens,
        prefix_hit_tokens=scheduler.manager.prefix_hit_tokens,
        prompt_tokens=scheduler.num_prompt_tokens,
        generation_tokens=num_generated_tokens,
        transferred_bytes=transferred_bytes,
    )


def reset_peaks(scheduler: Scheduler, memory: MemoryProbe, *, clear_prefix_cache: bool) -> None:
    """Start new peaks; what no request holds is forgotten too if asked for."""
    pool = scheduler.manager.pool
    pool.reset_peak()
    memory.reset_peak()
    if clear_prefix_cache:
        pool.clear_cache()
