"""Handlers besides the chat APIs: liveness, readiness, metrics, records, the engines' figures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, runtime_checkable

import msgspec
from aiohttp import web

from backends.protocol.messages import EngineStats
from gateway.core.errors import GatewayError, InvalidRequest, NotFound
from gateway.service import Body
from gateway.settings.layout import kinds
from gateway.web.body import read_body
from gateway.web.keys import (
    CLIENT_KEY,
    ENGINE,
    GENERATION,
    METRICS,
    RECORDS,
    RELOADER,
    ROLES,
    EngineControl,
    VariantControl,
)
from gateway.web.pairs import pair_figures, pair_states, set_pair_metrics
from gateway.web.paths import Place

_STATS_SECONDS = 2.0
_NUM_RECORDS = 20  # in a list of them, unless more are asked for
_MAX_DIGITS = 9


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _version() -> str:
    try:
        return version("kvgate")
    except PackageNotFoundError:
        return "unknown"


_VERSION = _version()  # read once: a probe must not need a file, least of all when no more can be opened


async def health(request: web.Request, _place: Place) -> web.Response:
    settings = request[GENERATION].settings
    layout = {"default_mode": settings.cache_layout.mode, "modes": kinds(settings)}
    return _json({"status": "ok", "name": "kvgate", "version": _VERSION, **layout})


async def ready(request: web.Request, _place: Place) -> web.Response:
    """Whether requests that choose nothing are served, and the state of everything that serves."""
    app, generation = request.app, request[GENERATION]
    mode = generation.settings.cache_layout.mode
    engine = app.get(ENGINE)
    health = generation.service.target_health()
    targets: dict[str, dict[str, Any]] = {
        name: {"kind": target.kind, "reachable": target.reachable, **health[name]}
        for name, target in generation.targets.items()
    }
    targets |= pair_states(generation.pairs)
    state: dict[str, Any] = {"targets": targets, "default_mode": mode, "modes": kinds(generation.settings)}
    state |= {"notices": generation.notices, "version": _VERSION, "settings": _reload_state(app)}
    is_ready = bool(generation.targets) or any(pair.serves(mode) for pair in generation.pairs.values())
    if engine is not None:
        is_ready = mode in engine.modes()
        targets[engine.name] = {
            "kind": "engine",
            "modes": list(engine.modes()),
            "instances": _instances(engine),
            "pairs": _pairs(engine),
            "variants": _variants(engine),
        }
    return _json({"ready": is_ready, **state}, 200 if is_ready else 503)


def _reload_state(app: web.Application) -> Any:
    """Which settings are in force, and why the newest ones aren't, if they aren't."""
    return msgspec.to_builtins(app[RELOADER].state) if RELOADER in app else None


def _instances(engine: object) -> Any:
    """The state of each instance as plain values, without paths of this machine."""
    state = engine.ready_state() if isinstance(engine, EngineControl) else []
    return _without(msgspec.to_builtins(state), "model_path")


@runtime_checkable
class PairControl(Protocol):
    """What can be asked of an engine whose prefill and decode instances are connected with one another."""

    def pair_state(self) -> Sequence[PairReport]: ...


class PairReport(Protocol):
    """One prefill with one decode instance, and whether they are connected."""

    @property
    def prefill(self) -> str: ...

    @property
    def decode(self) -> str: ...

    @property
    def connected(self) -> bool: ...


def _pairs(engine: object) -> Any:
    """Who of the split engine is connected with whom."""
    return msgspec.to_builtins(engine.pair_state()) if isinstance(engine, PairControl) else []


def _variants(engine: object) -> Any:
    """The state of each engine variant; readiness doesn't depend on it."""
    return msgspec.to_builtins(engine.variant_state()) if isinstance(engine, VariantControl) else []


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, name) for key, item in value.items() if key != name}
    return [_without(item, name) for item in value] if isinstance(value, list | tuple) else value


async def metrics(request: web.Request, _place: Place) -> web.Response:
    app = request.app
    if ENGINE in app and isinstance(app[ENGINE], EngineControl):
        engine = app[ENGINE]
        names = engine.instance_names() if isinstance(engine, VariantControl) else ROLES
        app[METRICS].set_engines(await _stats(app), names)
        if isinstance(engine, PairControl):
            pairs = engine.pair_state()
            app[METRICS].set_pairs({(pair.prefill, pair.decode): pair.connected for pair in pairs})
    app[METRICS].set_targets(request[GENERATION].service.target_figures())
    await set_pair_metrics(app, request[GENERATION].pairs)
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=app[METRICS].render(), headers=headers)


async def _stats(app: web.Application) -> Mapping[str, EngineStats]:
    """Of the instances that answer in time; a scrape must not wait for a long step."""
    engine = app.get(ENGINE)
    if not isinstance(engine, EngineControl):
        return {}
    try:
        async with asyncio.timeout(_STATS_SECONDS):
            return await engine.stats()
    except (TimeoutError, GatewayError):
        return {}


async def engines(request: web.Request, _place: Place) -> web.Response:
    stats = await _stats(request.app)
    figures = {name: _plain(entry) for name, entry in stats.items()}
    engine = request.app.get(ENGINE)
    state = {"instances": _instances(engine), "pairs": _pairs(engine), "variants": _variants(engine)}
    return _json({"engines": figures, **state, "upstreams": await pair_figures(request[GENERATION].pairs)})


def _plain(stats: EngineStats) -> dict[str, Any]:
    """Every figure, zeros too."""
    return msgspec.structs.asdict(stats)


async def reset_peaks(request: web.Request, _place: Place) -> web.Response:
    data = await read_body(request, 64 * 1024)
    clear = Body(data).value("clear_prefix_cache") if data.strip() else None
    if clear is not None and not isinstance(clear, bool):
        raise InvalidRequest("`clear_prefix_cache` must be true or false.", param="clear_prefix_cache")
    engine = request.app.get(ENGINE)
    if not isinstance(engine, EngineControl):
        raise NotFound("This gateway runs no engine of its own.")
    await engine.reset_peaks(clear_prefix_cache=bool(clear))
    return _json({"reset": True, "clear_prefix_cache": bool(clear)})


async def records(request: web.Request, _place: Place) -> web.Response:
    """The last finished requests, newest first; a key sees its own."""
    most = max(1, request[GENERATION].settings.limits.max_records)
    limit = _whole_number(request.query.get("limit", str(min(_NUM_RECORDS, most))))
    if limit is None or not 1 <= limit <= most:
        raise InvalidRequest(f"`limit` must be a whole number from 1 to {most}.", param="limit")
    key = request.get(CLIENT_KEY)
    found = request.app[RECORDS].newest(most)
    mine = [entry for entry in found if key is None or entry.key_name == key.name]
    return _json({"requests": mine[:limit]})


def _whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


async def record(request: web.Request, place: Place) -> web.Response:
    found, key = request.app[RECORDS].get(place.tail), request.get(CLIENT_KEY)
    if found is None or (key is not None and found.key_name != key.name):
        raise NotFound("No finished request has this id, or it is too long ago.")
    return _json(found)
