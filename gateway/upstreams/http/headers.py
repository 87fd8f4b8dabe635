"""Which headers cross the gateway, in both directions. Pure: names and values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HOP_HEADER = "X-Kvgate-Hop"  # ids of the gateways that a request has been through
MAX_HOPS = 4

_TO_UPSTREAM = frozenset({"accept-language", "user-agent", "idempotency-key", "x-session-id", "x-session-affinity"})
_TO_UPSTREAM_PREFIXES = ("openai-", "anthropic-", "x-stainless-", "x-claude-code-")
_TO_CLIENT = {
    "content-type": "Content-Type",
    "retry-after": "Retry-After",
    "retry-after-ms": "Retry-After-Ms",
    "x-should-retry": "X-Should-Retry",
    "x-request-id": "X-Upstream-Request-Id",
    "x-cache-mode": "X-Cache-Mode",
    "content-encoding": "Content-Encoding",
}
_TO_CLIENT_PREFIXES = ("x-ratelimit-", "openai-", "anthropic-")
CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")


def to_upstream(client: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that concern an upstream. Credentials, cookies, hop-by-hop and our own never do."""
    named = set(_listed(client, "connection"))
    return {
        name: value
        for name, value in client.items()
        if (lower := name.lower()) not in named
        and (lower in _TO_UPSTREAM or lower.startswith(_TO_UPSTREAM_PREFIXES))
        and lower not in CREDENTIALS
    }


def client_credentials(client: Mapping[str, str]) -> dict[str, str]:
    """The client's own key, for a target that is told to use it."""
    return {name: value for name, value in client.items() if name.lower() in CREDENTIALS}


def to_client(upstream: Iterable[tuple[str, str]]) -> dict[str, str]:
    """An upstream's headers that concern the client. Length, framing and cookies are not among them."""
    kept: dict[str, str] = {}
    for name, value in upstream:
        lower = name.lower()
        shown = _TO_CLIENT.get(lower, name if lower.startswith(_TO_CLIENT_PREFIXES) else None)
        if shown is not None:
            kept[shown] = value
    return kept


def hops(client: Mapping[str, str]) -> list[str]:
    return _listed(client, HOP_HEADER.lower())


def _listed(headers: Mapping[str, str], lower_name: str) -> list[str]:
    """What a header lists, in small letters. It may come in several lines, and proxies change how its name is spelt."""
    values = [value for name, value in headers.items() if name.lower() == lower_name]
    return [part for value in values for item in value.split(",") if (part := item.strip().lower())]
