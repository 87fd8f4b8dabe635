"""What a client is told in headers of how its request is served. Reads an `Exchange`, changes nothing."""

from __future__ import annotations

import re
import time

from gateway.service.exchange import Exchange

_NOT_PRINTABLE = re.compile(r"[^ -~]")
_MAX_HEADER = 2000  # characters of one header value; some clients refuse longer heads


def headers_of(exchange: Exchange) -> dict[str, str]:
    """What the client is told about how it is served, as far as it is known now."""
    found: dict[str, str | None] = {**exchange.upstream_headers, "X-Cache-Mode": exchange.served_mode}
    if exchange.strategy is not None:
        found["X-Cache-Mode-Requested"] = exchange.strategy.requested or "default"
        found["X-Cache-Mode-Source"] = exchange.strategy.source.value
    found["X-Cache-Variant"] = exchange.variant
    found["X-Cache-Instance"] = exchange.instance or None
    found["X-Cache-Instance-Reason"] = exchange.instance_reason or None
    if exchange.route is not None:
        found["X-Cache-Mode-Reason"] = exchange.route.reason
        found["X-Cache-Backend"] = exchange.route.target
    found["X-Kvgate-Attempts"] = str(exchange.num_attempts) if exchange.num_attempts > 1 else None
    found["X-Kvgate-Notice"] = "; ".join(exchange.notices) or None
    found["Server-Timing"] = _server_timing(exchange) or None
    if exchange.limit_headers is not None and (own := exchange.limit_headers()):  # of this key, not of the one beyond
        others = {name: value for name, value in found.items() if not name.lower().startswith("x-ratelimit-")}
        found = {**others, **own}
    return {name: header_value(value) for name, value in found.items() if value is not None}


def _server_timing(exchange: Exchange) -> str:
    phases: dict[str, float | None] = {}
    if exchange.sent_to_upstream_at is not None:
        phases["gateway"] = exchange.sent_to_upstream_at - exchange.call.arrived_at
    if exchange.timings is not None:
        phases["queue"] = exchange.timings.queue_seconds
        phases["prefill"] = exchange.timings.prefill_seconds
        if exchange.timings.transfer_bytes or exchange.timings.transfer_seconds:
            phases["kv_transfer"] = exchange.timings.transfer_seconds
        phases["decode"] = exchange.timings.decode_seconds
    if exchange.served is not None:
        phases["queue"] = exchange.served.queue_seconds
        phases["prefill"] = exchange.served.prefill_seconds
        phases["decode_first"] = exchange.served.decode_first_seconds
    if exchange.stream or exchange.timings is not None:  # an answer in one piece from elsewhere has no first token
        phases["ttft"] = exchange.clock.time_to_first_token_seconds()
    phases["total"] = time.monotonic() - exchange.call.arrived_at
    return ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in phases.items() if seconds is not None)


def header_value(text: str) -> str:
    """Printable ASCII in one line, cut where clients would refuse it."""
    safe = text if text.isascii() and text.isprintable() else _NOT_PRINTABLE.sub("?", text)
    return safe if len(safe) <= _MAX_HEADER else safe[: _MAX_HEADER - 3] + "..."
