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
    """One instance to run: its role, its name in logs and figures, its EngineConfig as plain JSON values."""

    role: Role
    name: str
    config: dict[str, Any]


def instance_plans(settings: Settings, engine: EngineSettings, *, num_cores: int | None = None) -> list[InstancePlan]:
    """The instances that the enabled modes need. Merged first: it is ready first."""
    cores = num_cores or available_cores()
    roles = [role for mode in CacheMode if mode in engine.modes for role in ROLES_OF_MODE[mode]]
    return [InstancePlan(role, role, engine_config(settings, engine, role, num_cores=cores)) for role in roles]


def variant_plans(
    settings: Settings, engine: EngineSettings, mode: CacheMode, kv_cache_dtype: str, *, num_cores: int | None = None
) -> list[InstancePlan]:
    """The instances of one engine variant: as the main engine's of this mode, but for the dtype of the KV cache."""
    cores = num_cores or available_cores()
    plans = []
    for role in ROLES_OF_MODE[mode]:
        config = engine_config(settings, engine, role, num_cores=cores) | {"kv_cache_dtype": kv_cache_dtype}
        plans.append(InstancePlan(role, instance_name(role, kv_cache_dtype), config))
    return plans


def instance_name(role: Role, kv_cache_dtype: str | None = None) -> str:
    """`prefill`, or `prefill[int8]` for an instance of a variant."""
    return role if kv_cache_dtype is None else f"{role}[{kv_cache_dtype}]"


def instance_names(engine: EngineSettings) -> tuple[str, ...]:
    """Of every instance that may ever run: the closed set of metric labels."""
    roles = [role for mode in CacheMode if mode in engine.modes for role in ROLES_OF_MODE[mode]]
    return tuple(instance_name(role, dtype) for dtype in (None, *engine.kv_cache_variants) for role in roles)


def variant_cost(settings: Settings, engine: EngineSettings) -> str:
    """What a variant takes while it runs, for the log."""
    cache = settings.kv_cache
    if cache.num_kv_blocks is not None:
        pool = f"{cache.num_kv_blocks} blocks (num_kv_blocks)"
    elif cache.kv_cache_gib is not None:
        pool = f"{cache.kv_cache_gib:g} GiB (kv_cache_gib)"
    else:
        pool = "1 GiB on a CPU, or what a CUDA device still has to give"
    return (
        f"each of its processes has its own copy of the weights and a KV pool of {pool}; their memory comes back when "
        f"no request has asked for it for {engine.variant_idle_seconds:g} s"
    )


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
        "auto_kv_dtype_gib": cache.decode_kv_limit_gb if role != "merged" else None,
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
