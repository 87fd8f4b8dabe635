"""Which headers cross the gateway, in both directions. Pure: names and values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import isfinite

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
_CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")


def to_upstream(client: Mapping[str, str]) -> dict[str, str]:
    """The client's headers that concern an upstream. Credentials, cookies, hop-by-hop and our own never do."""
    named = {name.strip().lower() for name in client.get("Connection", "").split(",")}
    return {
        name: value
        for name, value in client.items()
        if (lower := name.lower()) not in named
        and (lower in _TO_UPSTREAM or lower.startswith(_TO_UPSTREAM_PREFIXES))
        and lower not in _CREDENTIALS
    }


def client_credentials(client: Mapping[str, str]) -> dict[str, str]:
    """The client's own key, for a target that is told to use it."""
    return {name: value for name, value in client.items() if name.lower() in _CREDENTIALS}


def to_client(upstream: Iterable[tuple[str, str]]) -> dict[str, str]:
    """An upstream's headers that concern the client. Length, framing and cookies are not among them."""
    kept: dict[str, str] = {}
    for name, value in upstream:
        lower = name.lower()
        shown = _TO_CLIENT.get(lower, name if lower.startswith(_TO_CLIENT_PREFIXES) else None)
        if shown is not None:
            kept[shown] = value
    return kept


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """How long to stay away, by Retry-After-Ms or Retry-After: a number of seconds, or a date. None = not said.

    `now` is in seconds since the epoch.
    """
    for name, unit in (("Retry-After-Ms", 1e-3), ("Retry-After", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if isfinite(seconds):
            return max(0.0, seconds)
    try:
        at = parsedate_to_datetime(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return max(0.0, at.replace(tzinfo=at.tzinfo or UTC).timestamp() - now)


def hops(client: Mapping[str, str]) -> list[str]:
    return [hop.strip() for hop in client.get(HOP_HEADER, "").split(",") if hop.strip()]
