"""Redirects of providers are not followed: key and prompt would go wherever they lead.

litellm's and openai's clients follow them, each by a switch of its own. What they send over HTTP, be it of a provider
that comes tomorrow, goes through two methods of httpx; there it is decided once, for the whole process. Images that a
request names are fetched by litellm's own steps, each of them checked and without a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

PROVIDERS_THAT_FOLLOW = frozenset({"aiohttp_openai"})  # by a client of another library, with no switch for it
_MARK = "follows_no_redirect"


def follow_none(httpx: Any) -> None:
    """Once or more often."""
    for client in (httpx.AsyncClient, httpx.Client):
        if not hasattr(client.send, _MARK):
            client.send = _unfollowing(client.send)


def _unfollowing(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def send_once(self: Any, request: Any, **options: Any) -> Any:
        return send(self, request, **{**options, "follow_redirects": False})

    setattr(send_once, _MARK, True)
    return send_once
