"""The events and effects of the engine variants' state machine: a closed set of plain data. Knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from gateway.core.types import CacheMode


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Which variant. Written `split[int8]`."""

    mode: CacheMode
    kv_cache_dtype: str

    @override
    def __str__(self) -> str:
        return f"{self.mode.value}[{self.kv_cache_dtype}]"


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Ask:
    waiter: int
    key: VariantKey


@dataclass(frozen=True, slots=True)
class Leave:
    """Its request is over, or nobody waits for it any more. Of a waiter that was refused: nothing."""

    waiter: int


@dataclass(frozen=True, slots=True)
class CameUp:
    key: VariantKey


@dataclass(frozen=True, slots=True)
class Broke:
    """It could not start, or its instances were given up."""

    key: VariantKey
    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """None of its processes is left."""

    key: VariantKey


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    """`deadline` may have come."""


Event = Ask | Leave | CameUp | Broke | Stopped | Shutdown | Tick

# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class StartVariant:
    key: VariantKey


@dataclass(frozen=True, slots=True)
class StopVariant:
    key: VariantKey
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    waiter: int
    key: VariantKey


@dataclass(frozen=True, slots=True)
class Refuse:
    waiter: int
    reason: str
    busy: bool = False  # all places are taken; nothing is broken
    retry_after_seconds: float | None = None


Effect = StartVariant | StopVariant | Grant | Refuse
