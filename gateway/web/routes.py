"""One table: endpoint, method, handler. Everything that comes in goes through `dispatch`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.core.errors import MethodNotAllowed, NotFound
from gateway.settings.schema import Settings
from gateway.web import admin, chat, models
from gateway.web.dialects import speaks_gemini
from gateway.web.guard import check_host, check_key, check_no_key_in_url, check_origin
from gateway.web.keys import CLIENT_KEY, GENERATION, IN_FORCE
from gateway.web.paths import Place, find, nothing_at

PlaceHandler = Callable[[web.Request, Place], Awaitable[web.StreamResponse]]

ROUTES: dict[str, dict[str, PlaceHandler]] = {
    "chat/completions": {"POST": chat.answer},
    "completions": {"POST": chat.answer},
    "messages": {"POST": chat.answer},
    "messages/count_tokens": {"POST": chat.count_tokens},
    "responses": {"POST": chat.answer},
    "responses/compact": {"POST": chat.not_here},
    "embeddings": {"POST": chat.not_here},
    "models/*:generateContent": {"POST": chat.answer},
    "models/*:streamGenerateContent": {"POST": chat.answer},
    "models/*:countTokens": {"POST": chat.count_tokens},
    "models/*:embedContent": {"POST": chat.not_here},
    "models/*:batchEmbedContents": {"POST": chat.not_here},
    "models": {"GET": models.models},
    "models/*": {"GET": models.model},
    "requests": {"GET": admin.records},
    "requests/*": {"GET": admin.record},
    "engines": {"GET": admin.engines},
    "admin/reset_peaks": {"POST": admin.reset_peaks},
    "metrics": {"GET": admin.metrics},
    "ready": {"GET": admin.ready},
    "health": {"GET": admin.health},
    "": {"GET": admin.health},
}
OPEN = frozenset({"", "health", "ready"})  # for probes, which carry no key


async def dispatch(request: web.Request) -> web.StreamResponse:
    """Everything of one request is done by the settings that were in force when it came."""
    with request.app[IN_FORCE].held() as generation:
        request[GENERATION] = generation
        return await _dispatch(request, generation.settings)


async def _dispatch(request: web.Request, settings: Settings) -> web.StreamResponse:
    server, keys = settings.server, settings.keys
    host = request.headers.get("Host")
    check_host(host, server)
    check_origin(request.headers.get("Origin"), host)
    place = find(request.path)
    if place is None or place.name not in OPEN:
        headers = request.headers
        if speaks_gemini(request, place):
            check_no_key_in_url(request.query)
        api_keys = [*headers.getall("x-api-key", ()), *headers.getall("x-goog-api-key", ())]
        key = check_key(headers.getall("Authorization", ()), api_keys, keys)
        if key is not None:
            request[CLIENT_KEY] = key
    if place is None:
        raise NotFound(nothing_at(request.path))
    methods = ROUTES[place.name]
    handler = methods.get("GET" if request.method == "HEAD" else request.method)
    if handler is None:
        allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
        raise MethodNotAllowed(f"Method {request.method[:20]} is not allowed here.", allowed=allowed)
    return await handler(request, place)
