"""From the gateway's settings to what each engine instance is told. Pure but for counting cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backends.protocol.messages import Role
from gateway.core.types import CacheMode
from gateway.settings.errors import SettingsError
from gateway.settings.layout import OPTION_OF_ROLE, ROLES_OF_MODE, devices_of, enabled_roles
from gateway.settings.schema import EngineSettings, Settings
from gateway.upstreams.engine.cores import Share, available_cores, bindable_cores, divide


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """One instance to run: its role, its name in logs and figures, its EngineConfig as plain JSON values."""

    role: Role
    name: str
    config: dict[str, Any]


def instance_plans(
    settings: Settings, engine: EngineSettings, *, num_cores: int | None = None, cpus: Sequence[int] | None = None
) -> list[InstancePlan]:
    """The instances that the enabled modes need. Merged first: it is ready first.

    `cpus` are the cores to bind to; by default all of this machine's that may be bound to, if `num_cores` is not set.
    Raises SettingsError if a mode would have more instances than cores.
    """
    return [
        plan
        for mode in CacheMode
        if mode in engine.modes
        for plan in _plans_of_mode(settings, engine, mode, None, num_cores=num_cores, cpus=cpus)
    ]


def variant_plans(
    settings: Settings, engine: EngineSettings, mode: CacheMode, kv_cache_dtype: str, *, num_cores: int | None = None
) -> list[InstancePlan]:
    """The instances of one engine variant: as the main engine's of this mode, but for the dtype of the KV cache."""
    return _plans_of_mode(settings, engine, mode, kv_cache_dtype, num_cores=num_cores, cpus=None)


def _plans_of_mode(
    settings: Settings,
    engine: EngineSettings,
    mode: CacheMode,
    variant: str | None,
    *,
    num_cores: int | None,
    cpus: Sequence[int] | None,
) -> list[InstancePlan]:
    if num_cores is None:
        num_cores = available_cores()
        cpus = bindable_cores(num_cores) if cpus is None else cpus
    roles = [(role, index) for role in ROLES_OF_MODE[mode] for index in range(len(devices_of(settings, role)))]
    plans = []
    for (role, index), share in zip(roles, _shares(settings, engine, mode, num_cores, cpus), strict=True):
        config = engine_config(settings, engine, role, index=index, share=share)
        name = instance_name(settings, role, index, variant)
        dtype = {} if variant is None else {"kv_cache_dtype": variant}
        plans.append(InstancePlan(role, name, {**config, "name": name, **dtype}))
    return plans


def _shares(
    settings: Settings, engine: EngineSettings, mode: CacheMode, num_cores: int, cpus: Sequence[int] | None
) -> list[Share]:
    """Of the instances of a mode, in the order of their plans: the cores are divided between all of them.

    The two modes do not share: each has all cores while the other is idle, and they compete when both are at work.
    """
    threads = {"merged": engine.merged_threads, "prefill": engine.prefill_threads, "decode": engine.decode_threads}
    counts = {role: len(devices_of(settings, role)) for role in ROLES_OF_MODE[mode]}
    by_user = [role for role in counts if threads[role] is not None]
    _check_cores(engine, {role: count for role, count in counts.items() if role not in by_user}, num_cores)
    divided = divide(num_cores, sum(counts.values()), None if by_user else cpus)
    roles = [role for role, count in counts.items() for _ in range(count)]
    return [Share(threads[role] or share.num_threads, share.cpus) for role, share in zip(roles, divided, strict=True)]


def _check_cores(engine: EngineSettings, counts: dict[Role, int], num_cores: int) -> None:
    """One instance of each role runs anywhere, even where the two sides of split have to share one core."""
    several = {role: count for role, count in counts.items() if count > 1}
    if engine.device == "cuda" or not several or sum(counts.values()) <= num_cores:
        return
    options = " and ".join(f"cache_layout.{OPTION_OF_ROLE[role]}" for role in several)
    wanted = ", ".join(f"{count} {role}" for role, count in counts.items())
    raise SettingsError(
        f"{options}: {wanted} instances need a core each, and this process may use {num_cores}. Name fewer devices; "
        "an empty list is one instance"
    )


def instance_name(settings: Settings, role: Role, index: int, kv_cache_dtype: str | None = None) -> str:
    """`prefill`, `prefill-1` where there are several, `prefill-1[int8]` for an instance of a variant."""
    name = role if len(devices_of(settings, role)) == 1 else f"{role}-{index}"
    return name if kv_cache_dtype is None else f"{name}[{kv_cache_dtype}]"


def instance_names(settings: Settings, engine: EngineSettings) -> tuple[str, ...]:
    """Of every instance that may ever run: the closed set of metric labels."""
    return tuple(
        instance_name(settings, role, index, dtype)
        for dtype in (None, *engine.kv_cache_variants)
        for role in enabled_roles(engine)
        for index in range(len(devices_of(settings, role)))
    )


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
        f"each of its processes has a KV pool of {pool}, and its own copy of the weights if there is no packed file to "
        f"share; their memory comes back when no request has asked for it for {engine.variant_idle_seconds:g} s"
    )


def engine_config(
    settings: Settings, engine: EngineSettings, role: Role, *, index: int, share: Share
) -> dict[str, Any]:
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
        "served_name": engine.public_name(),
        "device": _device(settings, engine, role, index),
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
        "transfer_backend": transfer.backend,
        "lease_seconds": transfer.lease_seconds,
        "handoff_timeout_seconds": transfer.handoff_timeout_seconds,
        "num_threads": share.num_threads,
        "cpus": share.cpus,
    }
    return {name: value for name, value in config.items() if value is not None}


def _device(settings: Settings, engine: EngineSettings, role: Role, index: int) -> str:
    if engine.device not in ("auto", "cuda"):
        return engine.device
    return f"{engine.device}:{devices_of(settings, role)[index]}"
