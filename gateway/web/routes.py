"""One table: endpoint, method, handler. Everything that comes in goes through `dispatch`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.core.errors import MethodNotAllowed, NotFound
from gateway.web import admin, chat
from gateway.web.guard import check_host, check_key, check_origin
from gateway.web.keys import CLIENT_KEY, SETTINGS
from gateway.web.paths import Place, find

PlaceHandler = Callable[[web.Request, Place], Awaitable[web.StreamResponse]]

ROUTES: dict[str, dict[str, PlaceHandler]] = {
    "chat/completions": {"POST": chat.chat_completions},
    "completions": {"POST": chat.completions},
    "models": {"GET": admin.models},
    "models/*": {"GET": admin.model},
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
    server, keys = request.app[SETTINGS].server, request.app[SETTINGS].keys
    host = request.headers.get("Host")
    check_host(host, server)
    check_origin(request.headers.get("Origin"), host)
    place = find(request.path)
    if place is None or place.name not in OPEN:
        headers = request.headers
        key = check_key(headers.getall("Authorization", ()), headers.getall("x-api-key", ()), keys)
        if key is not None:
            request[CLIENT_KEY] = key
    if place is None:
        raise NotFound(f"There is nothing at {request.path[:200]!r}. The API is at /v1, such as /v1/chat/completions.")
    methods = ROUTES[place.name]
    handler = methods.get("GET" if request.method == "HEAD" else request.method)
    if handler is None:
        allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
        raise MethodNotAllowed(f"Method {request.method[:20]} is not allowed here.", allowed=allowed)
    return await handler(request, place)
