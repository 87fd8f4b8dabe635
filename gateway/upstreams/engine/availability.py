"""Whether a set of instances can serve a mode now, will later, or never. Reads a fleet; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from backends.protocol.messages import Role
from gateway.core.types import CacheMode
from gateway.settings.layout import ROLES_OF_MODE
from gateway.upstreams.engine.fleet import Fleet, Taker
from gateway.upstreams.engine.supervisor import InstanceState

TAKER_OF_MODE: dict[CacheMode, Role] = {CacheMode.MERGED: "merged", CacheMode.SPLIT: "decode"}
OVER = (InstanceState.FAILED, InstanceState.STOPPED)


def takers(fleet: Fleet, mode: CacheMode) -> list[Taker]:
    """Whoever takes the requests of a mode; none while it can't be served."""
    return fleet.takers(TAKER_OF_MODE[mode])


def given_up(fleet: Fleet, mode: CacheMode) -> bool:
    """Whether of some role that the mode needs no instance will come back."""
    return any(all(report.state in OVER for report in fleet.reports(role)) for role in ROLES_OF_MODE[mode])


def restart_seconds(fleet: Fleet, mode: CacheMode) -> float | None:
    """How long a restart that the mode waits for will take, by how long the starts before it took.

    None: it waits for no restart, but for a first start, or for what was given up.
    """
    longest = 0.0
    for role in ROLES_OF_MODE[mode]:
        reports = fleet.reports(role)
        if any(report.state is InstanceState.READY for report in reports):
            continue
        coming = (InstanceState.RESTARTING, InstanceState.STARTING)
        known = [report.start_seconds for report in reports if report.state in coming]
        seconds = [each for each in known if each is not None]
        if not seconds:
            return None
        longest = max(longest, min(seconds))
    return longest


def why_not(fleet: Fleet, mode: CacheMode) -> str:
    """The state of each instance that the mode waits for: `decode is starting (...); prefill is failed (...)`."""
    reports = [report for role in ROLES_OF_MODE[mode] for report in fleet.reports(role)]
    return "; ".join(
        f"{report.name} is {report.state.value}" + (f" ({report.reason})" if report.reason else "")
        for report in reports
        if report.state is not InstanceState.READY
    )


def kv_dtype_refusal(asked: str, mode: CacheMode, own: str | None, variants: Sequence[str]) -> str:
    """What to tell who asked for a KV dtype that neither the main engine (`own`) nor a variant has."""
    found = f"the KV cache of the {mode.value} engine is {own}" if own else f"the {mode.value} engine was given up"
    allowed = " or ".join(map(repr, dict.fromkeys(["auto", *([own] if own else []), *variants])))
    others = ", ".join(variants) or "none (engine.kv_cache_variants in the settings)"
    return (
        f"kvCacheDtype {asked!r} is not available: {found}. Use {allowed}. Engine variants started on demand: {others}."
    )
