"""Handlers besides the chat APIs: liveness, readiness, models, metrics, records, the engines' figures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from aiohttp import web

from backends.protocol.messages import EngineStats
from gateway.core.errors import GatewayError, InvalidRequest, ModelNotFound, NotFound
from gateway.core.types import ModelCard
from gateway.service import Body
from gateway.web.body import read_body
from gateway.web.keys import (
    CLIENT_KEY,
    ENGINE,
    METRICS,
    NOTICES,
    RECORDS,
    ROLES,
    SERVICE,
    SETTINGS,
    STARTED_AT,
    TARGETS,
    EngineControl,
    VariantControl,
)
from gateway.web.paths import Place

_STATS_SECONDS = 2.0


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _version() -> str:
    try:
        return version("kvgate")
    except PackageNotFoundError:
        return "unknown"


_VERSION = _version()  # read once: a probe must not need a file, least of all when no more can be opened


async def health(_request: web.Request, _place: Place) -> web.Response:
    return _json({"status": "ok", "name": "kvgate", "version": _VERSION})


async def ready(request: web.Request, _place: Place) -> web.Response:
    """Whether requests that choose nothing are served, and the state of everything that serves."""
    app = request.app
    mode = app[SETTINGS].cache_layout.mode
    engine = app.get(ENGINE)
    targets: dict[str, dict[str, Any]] = {
        name: {"kind": "openai", "reachable": target.reachable} for name, target in app[TARGETS].items()
    }
    state: dict[str, Any] = {"targets": targets, "default_mode": mode, "notices": app[NOTICES], "version": _VERSION}
    is_ready = engine is None and bool(targets)
    if engine is not None:
        is_ready = mode in engine.modes()
        targets[engine.name] = {
            "kind": "engine",
            "modes": list(engine.modes()),
            "instances": _instances(engine),
            "variants": _variants(engine),
        }
    return _json({"ready": is_ready, **state}, 200 if is_ready else 503)


def _instances(engine: object) -> Any:
    """The state of each instance as plain values, without paths of this machine."""
    state = engine.ready_state() if isinstance(engine, EngineControl) else []
    return _without(msgspec.to_builtins(state), "model_path")


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
        names = engine.instance_names() if isinstance(engine, VariantControl) else ()
        app[METRICS].set_engines(await _stats(app), tuple(dict.fromkeys([*ROLES, *names])))
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
    figures = {role: _plain(entry) for role, entry in stats.items()}
    engine = request.app.get(ENGINE)
    return _json({"engines": figures, "instances": _instances(engine), "variants": _variants(engine)})


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


async def record(request: web.Request, place: Place) -> web.Response:
    found, key = request.app[RECORDS].get(place.tail), request.get(CLIENT_KEY)
    if found is None or (key is not None and found.key_name != key.name):
        raise NotFound("No finished request has this id, or it is too long ago.")
    return _json(found)


async def models(request: web.Request, _place: Place) -> web.Response:
    """OpenAI's list; `models` is there for a client that insists on it."""
    return _json({"object": "list", "data": await _entries(request), "models": []})


async def model(request: web.Request, place: Place) -> web.Response:
    entries = await _entries(request)
    for entry in entries:
        if entry["id"] == place.tail:
            return _json(entry)
    raise ModelNotFound(place.tail[:200], [entry["id"] for entry in entries])


async def _entries(request: web.Request) -> list[dict[str, Any]]:
    created = request.app[STARTED_AT]
    entries: list[dict[str, Any]] = []
    for card in await request.app[SERVICE].models():
        entries.append(_entry(card, card.id, card.modes, created))
        if len(card.modes) > 1:
            entries += [_entry(card, f"{card.id}:{mode}", (mode,), created) for mode in card.modes]
    return entries


def _entry(card: ModelCard, model_id: str, modes: Any, created: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **card.extra,
        "id": model_id,
        "object": "model",
        "created": card.created or created,
        "owned_by": card.owned_by,
        "backend": card.target,
    }
    if card.max_model_len is not None:
        entry["max_model_len"] = card.max_model_len
    return entry | ({"modes": list(modes)} if modes else {})
