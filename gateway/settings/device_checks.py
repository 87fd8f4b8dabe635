"""What the lists of devices mean together: two instances on one device, labels on a CPU. Pure, as `checks` is."""

from __future__ import annotations

from collections.abc import Iterator

from backends.protocol.messages import Role
from gateway.core.types import CacheMode
from gateway.settings.entries import Draft
from gateway.settings.layout import OPTION_OF_ROLE, devices_of
from gateway.settings.schema import EngineSettings, Settings


def device_refusals(settings: Settings, draft: Draft) -> Iterator[str]:
    """What can't work on any machine."""
    engine = settings.effective_engine()
    if engine is None:
        return
    if settings.transfer.backend == "cuda_ipc" and engine.device == "cpu":
        place = draft.origin_of(("transfer", "backend"))
        yield f"{place}: cuda_ipc moves KV between CUDA devices, and engine.device is cpu; use local or nixl"
    yield from _crowded(settings, engine, draft)


def _crowded(settings: Settings, engine: EngineSettings, draft: Draft) -> Iterator[str]:
    """Without a size of its own a pool takes what its CUDA device has: the second one there would get nothing."""
    cache = settings.kv_cache
    if cache.kv_cache_gib is not None or cache.num_kv_blocks is not None:
        return
    for roles in _sharing_roles(settings, engine):
        devices = [device for role in roles for device in devices_of(settings, role)]
        for device in dict.fromkeys(device for i, device in enumerate(devices) if device in devices[:i]):
            place = draft.origin_of(("cache_layout", OPTION_OF_ROLE[roles[0]]))
            yield (
                f"{place}: {' and '.join(roles)} would have two instances on CUDA device {device}, and the first to "
                "start leaves no memory for the other. Give each a device of its own, or limit the pool of each by "
                "kv_cache.kv_cache_gib or kv_cache.num_kv_blocks"
            )


def _sharing_roles(settings: Settings, engine: EngineSettings) -> Iterator[tuple[Role, ...]]:
    """Roles that are certain to run on CUDA devices, together if they are the sides of one mode."""
    if engine.device == "cuda" and CacheMode.MERGED in engine.modes:
        yield ("merged",)
    by = settings.transfer.backend
    if CacheMode.SPLIT in engine.modes and ((engine.device == "cuda" and by != "local") or by == "cuda_ipc"):
        yield "decode", "prefill"


def device_advice(settings: Settings, draft: Draft) -> Iterator[str]:
    """What works, but not as the lists of devices let one hope."""
    layout, engine = settings.cache_layout, settings.effective_engine()
    if engine is None:
        return
    given = [name for name in ("prefill_gpus", "decode_gpus", "merged_gpus") if getattr(layout, name)]
    if engine.device == "cpu" and given:
        yield (
            f"{', '.join(given)}: engine.device is cpu, so the numbers are labels: each is one instance, and the "
            "instances of a mode share the cores"
        )
    for name in given:
        devices: tuple[int, ...] = getattr(layout, name)
        if len(set(devices)) < len(devices) and engine.device != "cpu":
            place = draft.origin_of(("cache_layout", name))
            yield f"{place}: a device is named twice and gets two instances, each with its own weights and KV pool"
    yield from _both_sides(settings, draft)


def _both_sides(settings: Settings, draft: Draft) -> Iterator[str]:
    layout, engine = settings.cache_layout, settings.effective_engine()
    if engine is not None and engine.device == "cpu":
        return  # labels: another number would change nothing
    for device in sorted(set(layout.prefill_gpus) & set(layout.decode_gpus)):
        yield (
            f"{draft.origin_of(('cache_layout', 'decode_gpus'))}: prefill and decode are both on device {device}: "
            "split will not lower the memory of a device; it will need more than merged"
        )
