"""The list of models, in the shape that each kind of client expects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from gateway.core.errors import ModelNotFound
from gateway.core.types import ModelCard
from gateway.service.key_limits import may_use
from gateway.web.dialects import speaks_anthropic, speaks_gemini
from gateway.web.keys import CLIENT_KEY, GENERATION, STARTED_AT
from gateway.web.paths import Place

_GEMINI_METHODS = ("generateContent", "streamGenerateContent", "countTokens")


async def models(request: web.Request, place: Place) -> web.Response:
    """OpenAI's list, with the `models` without which Codex gives up; or that of another API, for a client of it."""
    entries = await _entries(request)
    if speaks_gemini(request, place):
        return _json({"models": [_gemini_entry(entry) for entry in entries]})
    if speaks_anthropic(request):
        return _json(_anthropic_list([_anthropic_entry(entry) for entry in entries]))
    return _json({"object": "list", "data": entries, "models": []})


async def model(request: web.Request, place: Place) -> web.Response:
    entries = await _entries(request)
    for entry in entries:
        if entry["id"] == place.tail:
            if speaks_gemini(request, place):
                return _json(_gemini_entry(entry))
            return _json(_anthropic_entry(entry) if speaks_anthropic(request) else entry)
    raise ModelNotFound(place.tail[:200], [entry["id"] for entry in entries])


async def _entries(request: web.Request) -> list[dict[str, Any]]:
    created = request.app[STARTED_AT]
    entries: list[dict[str, Any]] = []
    key = request.get(CLIENT_KEY)
    for card in await request[GENERATION].service.models():
        if key is not None and not may_use(key, card.id):
            continue
        entries.append(_entry(card, card.id, card.modes, created))
        if len(card.modes) > 1:
            entries += [_entry(card, f"{card.id}:{mode}", (mode,), created) for mode in card.modes]
    return entries


def _entry(card: ModelCard, model_id: str, modes: Sequence[Any], created: int) -> dict[str, Any]:
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


def _anthropic_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """That API's fields, and beside them what is ours."""
    created = datetime.fromtimestamp(entry["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": created, **_ours(entry)}


def _gemini_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """That API's fields, and beside them what is ours. Prompt and answer share one context."""
    name, limit = entry["id"], entry.get("max_model_len")
    said: dict[str, Any] = {"name": f"models/{name}", "baseModelId": name, "version": "1", "displayName": name}
    if limit is not None:
        said |= {"inputTokenLimit": limit, "outputTokenLimit": limit}
    return said | {"supportedGenerationMethods": _GEMINI_METHODS, **_ours(entry)}


def _ours(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("backend", "max_model_len", "modes") if name in entry}


def _anthropic_list(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """All of them at once: `limit`, `after_id` and `before_id` of that API have nothing to page through."""
    ends = {"first_id": entries[0]["id"] if entries else None, "last_id": entries[-1]["id"] if entries else None}
    return {"data": entries, "has_more": False, **ends}


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
