"""What a configuration means on this machine: which device `auto` is, and how large a limited pool may be."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from backends.config import EngineConfig

DEFAULT_CPU_KV_GIB = 1.0  # as in EngineConfig.kv_cache_gib


def resolve_device(config: EngineConfig, cuda_is_available: Callable[[], bool]) -> EngineConfig:
    """The same configuration with a device that exists and a pool within its limit."""
    device = config.device
    kind, _, number = device.partition(":")
    if kind == "auto":
        # The split engine moves KV through the host's memory, so by itself it goes where that is.
        device = f"cuda:{number or 0}" if config.role == "merged" and cuda_is_available() else "cpu"
    return msgspec.structs.replace(config, device=device, kv_cache_gib=_limited_gib(config, device))


def device_notices(config: EngineConfig, cuda_is_available: Callable[[], bool]) -> tuple[str, ...]:
    """What `auto` decided that nobody would expect. Said once for the pair, by its decode side."""
    if config.role != "decode" or not config.device.startswith("auto") or not cuda_is_available():
        return ()
    return (
        "Split runs on the CPU though this machine has a CUDA device: with device 'auto' only merged uses it, since "
        "the two sides move KV through the host's memory. Compare the modes on one device with engine.device = 'cpu'.",
    )


def _limited_gib(config: EngineConfig, device: str) -> float | None:
    """On a CUDA device without a size of its own, the pool becomes as large as the limit allows."""
    size, limit = config.kv_cache_gib, config.kv_cache_limit_gib
    if limit is None:
        return size
    if size is None:
        return min(DEFAULT_CPU_KV_GIB, limit) if device == "cpu" else limit
    return min(size, limit)
