"""Typed keys under which the application and its requests keep things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiohttp import web

from backends.protocol.messages import EngineStats
from gateway.metrics import Metrics
from gateway.records.store import RecordStore
from gateway.settings.schema import KeySettings
from gateway.upstreams.base import EventUpstream
from gateway.web.generation import Generation, InForce, Reloads
from gateway.web.turns import TurnLimit


@runtime_checkable
class EngineControl(Protocol):
    """What can be asked of the bundled engine besides answers."""

    async def stats(self) -> Mapping[str, EngineStats]: ...

    async def reset_peaks(self, *, clear_prefix_cache: bool) -> Any: ...

    def ready_state(self) -> Any: ...


@runtime_checkable
class VariantControl(Protocol):
    """What can be asked of an engine that starts variants on demand."""

    def variant_state(self) -> Any: ...

    def instance_names(self) -> Sequence[str]:
        """Every name under which there may ever be figures: the closed set of the metrics' label."""


IN_FORCE = web.AppKey("in_force", InForce)
RELOADER: web.AppKey[Reloads] = web.AppKey("reloader", object)  # type: ignore[arg-type]  # absent: nothing to read again
METRICS = web.AppKey("metrics", Metrics)
RECORDS = web.AppKey("records", RecordStore)
STARTED_AT = web.AppKey("started_at", int)
TURNS = web.AppKey("turns", TurnLimit)
ENGINE: web.AppKey[EventUpstream] = web.AppKey("engine", object)  # type: ignore[arg-type]  # a Protocol; absent if none

GENERATION = web.RequestKey("generation", Generation)
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
CLIENT_KEY = web.RequestKey("client_key", KeySettings)
ROLES: Sequence[str] = ("merged", "prefill", "decode")
