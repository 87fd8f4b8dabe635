"""From the gateway's settings to what each engine instance is told. Pure but for counting cores."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol.messages import Role
from gateway.core.types import CacheMode
from gateway.settings.schema import EngineSettings, Settings

ROLES_OF_MODE: dict[CacheMode, tuple[Role, ...]] = {
    CacheMode.MERGED: ("merged",),
    CacheMode.SPLIT: ("decode", "prefill"),
}
CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance to run: its role and its EngineConfig as plain JSON values."""

    role: Role
    config: dict[str, Any]


def instance_plans(settings: Settings, engine: EngineSettings, *, num_cores: int | None = None) -> list[InstancePlan]:
    """The instances that the enabled modes need. Merged first: it is ready first."""
    cores = num_cores or available_cores()
    roles = [role for mode in CacheMode if mode in engine.modes for role in ROLES_OF_MODE[mode]]
    return [InstancePlan(role, engine_config(settings, engine, role, num_cores=cores)) for role in roles]


def engine_config(settings: Settings, engine: EngineSettings, role: Role, *, num_cores: int) -> dict[str, Any]:
    """The keys of `backends.config.EngineConfig`; values that are None are left to its defaults."""
    cache, scheduler, transfer = settings.kv_cache, settings.scheduler, settings.transfer
    max_num_seqs = {
        "merged": scheduler.merged_max_batch,
        "prefill": scheduler.prefill_max_batch,
        "decode": scheduler.decode_max_batch,
    }
    config: dict[str, Any] = {
        "role": role,
        "model": engine.model,
        "served_name": served_name(engine),
        "device": _device(settings, engine, role),
        "dtype": engine.dtype,
        "weight_dtype": engine.weight_dtype,
        "kv_cache_dtype": cache.kv_cache_dtype,
        "block_size": cache.block_size,
        "num_kv_blocks": cache.num_kv_blocks,
        "kv_cache_gib": cache.kv_cache_gib,
        "kv_cache_limit_gib": cache.decode_kv_limit_gb if role == "decode" else None,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "max_model_len": engine.max_model_len,
        "max_batched_tokens": scheduler.max_batched_tokens,
        "prefill_chunk_tokens": cache.prefill_chunk_tokens,
        "prefill_token_ratio": scheduler.prefill_token_ratio,
        "max_num_seqs": max_num_seqs[role],
        "max_waiting": scheduler.max_waiting,
        "enable_prefix_cache": scheduler.enable_prefix_cache,
        "transfer_mode": transfer.kv_transfer_mode,
        "max_transfer_concurrency": transfer.max_transfer_concurrency,
        "handoff_timeout_seconds": transfer.handoff_timeout_seconds,
        "num_threads": _num_threads(engine, role, num_cores),
    }
    return {name: value for name, value in config.items() if value is not None}


def served_name(engine: EngineSettings) -> str:
    """The name that clients use: as set, or the last part of the model's path or hub id."""
    if engine.served_name is not None:
        return engine.served_name
    name = engine.model.partition(":")[0].rstrip("/").rpartition("/")[2]
    return name.removesuffix(".gguf") or engine.model


def start_notices(settings: Settings, engine: EngineSettings) -> list[str]:
    """What of the settings has no effect, or not the effect that it may seem to have."""
    layout, cache = settings.cache_layout, settings.kv_cache
    notices = []
    lists = {"prefill_gpus": layout.prefill_gpus, "decode_gpus": layout.decode_gpus, "merged_gpus": layout.merged_gpus}
    given = [name for name, devices in lists.items() if devices]
    if given and engine.device == "cpu":
        notices.append(f"{', '.join(given)}: no effect, since the engine runs on the CPU (engine.device = 'cpu')")
    elif any(len(lists[name]) > 1 for name in given):
        several = ", ".join(name for name in given if len(lists[name]) > 1)
        notices.append(f"{several}: the bundled engine uses one device an instance, the first of the list")
    if cache.decode_kv_limit_gb is not None and cache.num_kv_blocks is not None:
        notices.append("decode_kv_limit_gb: no effect, since num_kv_blocks sets the size of every pool")
    return notices


def available_cores() -> int:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_CPU_MAX.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cores


def _device(settings: Settings, engine: EngineSettings, role: Role) -> str:
    layout = settings.cache_layout
    devices: dict[Role, Sequence[int]] = {
        "merged": layout.merged_gpus,
        "prefill": layout.prefill_gpus,
        "decode": layout.decode_gpus,
    }
    if engine.device not in ("auto", "cuda"):
        return engine.device
    return f"{engine.device}:{devices[role][0] if devices[role] else 0}"


def _num_threads(engine: EngineSettings, role: Role, num_cores: int) -> int:
    """Merged has all cores; prefill and decode work at the same time, and share them."""
    match role:
        case "merged":
            return engine.merged_threads or num_cores
        case "prefill":
            return engine.prefill_threads or max(1, num_cores // 2)
        case "decode":
            return engine.decode_threads or max(1, num_cores - num_cores // 2)
