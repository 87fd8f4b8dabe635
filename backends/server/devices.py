"""What a configuration means on this machine: which device `auto` is, how large a limited pool may be, which cores."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from backends.config import EngineConfig
from backends.core.cores import bind_this_thread

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_GIB = 1.0  # as in EngineConfig.kv_cache_gib
PREFILL_NICENESS = 5


def resolve_device(config: EngineConfig, cuda_is_available: Callable[[], bool]) -> EngineConfig:
    """The same configuration with a device that exists and a pool within its limit."""
    device = config.device
    kind, _, number = device.partition(":")
    if kind == "auto":
        # The split engine moves KV through the host's memory, so by itself it goes where that is.
        wants_cuda = config.role == "merged" or config.transfer_backend == "cuda_ipc"
        device = f"cuda:{number or 0}" if wants_cuda and cuda_is_available() else "cpu"
    return msgspec.structs.replace(config, device=device, kv_cache_gib=_limited_gib(config, device))


def device_notices(config: EngineConfig, cuda_is_available: Callable[[], bool]) -> tuple[str, ...]:
    """What `auto` decided that nobody would expect. Said once for the pair, by its decode side."""
    if config.role != "decode" or not config.device.startswith("auto") or not cuda_is_available():
        return ()
    if config.transfer_backend == "cuda_ipc":
        return ()
    return (
        "Split runs on the CPU though this machine has a CUDA device: with device 'auto' only merged uses it, since "
        "the two sides move KV through the host's memory. Compare the modes on one device with engine.device = 'cpu'.",
    )


def bind_computing_threads(config: EngineConfig) -> None:
    """Bind the calling thread, and so those that OpenMP will start from it, to the instance's own cores.

    On a CUDA device the thread only waits for it, and stays free. Not to be bound costs speed alone: it is said.
    """
    if config.cpus is None or config.device.startswith("cuda"):
        return
    reason = bind_this_thread(config.cpus)
    if reason is not None:
        logger.warning("computing threads are not bound to cores %s: %s", list(config.cpus), reason)


def give_way(config: EngineConfig) -> None:
    """Let the calling thread, and those that OpenMP will start from it, yield the cores where others want them.

    Of a prefill side on a CPU: what streams already (decode, gateway, client) waits milliseconds at a time, a prompt
    for seconds. On idle cores this changes nothing.
    """
    if config.role != "prefill" or config.device.startswith("cuda") or not hasattr(os, "setpriority"):
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREFILL_NICENESS)
    except OSError as error:
        logger.warning("the prefill's threads keep their priority: %s", error)


def _limited_gib(config: EngineConfig, device: str) -> float | None:
    """On a CUDA device without a size of its own, the pool becomes as large as the limit allows."""
    size, limit = config.kv_cache_gib, config.kv_cache_limit_gib
    if limit is None:
        return size
    if size is None:
        return min(DEFAULT_CPU_KV_GIB, limit) if device == "cpu" else limit
    return min(size, limit)
