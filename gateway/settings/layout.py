"""What the settings make of the two modes: which instances of which role, on which devices, and who serves. Pure."""

from __future__ import annotations

from backends.protocol.messages import Role
from gateway.core.types import CacheMode
from gateway.settings.schema import EngineSettings, PairSettings, Settings

ROLES_OF_MODE: dict[CacheMode, tuple[Role, ...]] = {
    CacheMode.MERGED: ("merged",),
    CacheMode.SPLIT: ("decode", "prefill"),
}
OPTION_OF_ROLE: dict[Role, str] = {"merged": "merged_gpus", "decode": "decode_gpus", "prefill": "prefill_gpus"}


def devices_of(settings: Settings, role: Role) -> tuple[int, ...]:
    """One device for each instance of a role. On a CPU they only say how many instances there are."""
    devices: tuple[int, ...] = getattr(settings.cache_layout, OPTION_OF_ROLE[role])
    return devices or (0,)


def enabled_roles(engine: EngineSettings) -> list[Role]:
    """Of the modes that run; merged first."""
    return [role for mode in CacheMode if mode in engine.modes for role in ROLES_OF_MODE[mode]]


def kinds(settings: Settings) -> dict[str, str]:
    """Each mode and what serves it, in words: for the start line, /health and /ready."""
    return {mode.value: kind_of(settings, mode) for mode in CacheMode}


def kind_of(settings: Settings, mode: CacheMode) -> str:
    engine, server = settings.effective_engine(), settings.server
    if engine is not None and mode in engine.modes:
        return f"bundled engine: {_instances(settings, mode)}"
    others = [server.name] if server.api_base else []
    others += [target.name for target in settings.targets if target.kind == "openai"]
    served = [words for pair in settings.pairs if (words := _pair_words(pair, mode))]
    served += [f"told to {', '.join(others)} by X-Cache-Mode"] if others else []
    untold = [target.name for target in settings.targets if target.kind == "litellm"]
    served += [f"left to {', '.join(untold)}, which is told no mode"] if untold else []
    return "; ".join(served) or "not served"


def _pair_words(pair: PairSettings, mode: CacheMode) -> str:
    if mode is CacheMode.MERGED:
        return f"{pair.name} ({pair.engine}): {len(pair.merged)} merged" if pair.merged else ""
    sides = f"{len(pair.prefill)} prefill + {len(pair.decode)} decode"
    return f"{pair.name} ({pair.engine}): {sides}" if pair.prefill and pair.decode else ""


def _instances(settings: Settings, mode: CacheMode) -> str:
    counts = {role: len(devices_of(settings, role)) for role in ROLES_OF_MODE[mode]}
    if mode is CacheMode.MERGED:
        return f"{counts['merged']} merged"
    transfer = settings.transfer
    return (
        f"{counts['prefill']} prefill + {counts['decode']} decode, "
        f"KV by {transfer.backend}, transfer by {transfer.kv_transfer_mode}"
    )
