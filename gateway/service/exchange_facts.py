"""What is kept of a request: its record, and its figures for the metrics. Reads an `Exchange`, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from backends.protocol.messages import Timings
from gateway.core.types import CacheMode
from gateway.metrics import RequestFigures
from gateway.records.store import Record
from gateway.service.clock import summary
from gateway.service.exchange import Exchange, Outcome
from gateway.upstreams.base import Served

_MAX_KEPT = 200  # characters of a name in a record

# What only split has: said of a merged answer, a 0 would look like a fact.
_SPLIT_FACTS = frozenset({
    "transfer_seconds", "transfer_overlapped_seconds", "transfer_bytes", "slot_wait_seconds", "decode_wait_seconds",
    "first_decode_step_seconds", "prefill_hit_tokens", "computed_tokens", "decode_held_tokens", "transferred_tokens",
})  # fmt: skip


def timing_facts(exchange: Exchange) -> dict[str, Any]:
    """Everything known about where the time went, by the names of metrics."""
    facts: dict[str, Any] = {"e2e_seconds": time.monotonic() - exchange.call.arrived_at}
    if exchange.stream or exchange.timings is not None:
        facts["time_to_first_token_seconds"] = exchange.clock.time_to_first_token_seconds()
    gaps = inter_token_seconds(exchange)
    if gaps:
        facts["inter_token_seconds"] = summary(gaps)
    if exchange.usage is not None:
        facts["prompt_tokens"] = exchange.usage.prompt_tokens
        facts["completion_tokens"] = exchange.usage.completion_tokens
        facts["cached_tokens"] = exchange.usage.cached_tokens
    if exchange.served is not None:
        facts |= _leg_facts(exchange.served)
    return facts | (_phase_facts(exchange.timings, exchange.served_mode) if exchange.timings is not None else {})


def inter_token_seconds(exchange: Exchange) -> Sequence[float]:
    return exchange.clock.inter_token_seconds(exchange.usage.completion_tokens if exchange.usage else None)


def figures_of(exchange: Exchange) -> RequestFigures:
    outcome = exchange.outcome or Outcome.ERROR
    return RequestFigures(
        dialect=exchange.call.dialect.name,
        cache_mode=exchange.served_mode or "none",
        backend=exchange.route.target if exchange.route else "none",
        outcome=outcome.value,
        cost_usd=exchange.cost_usd,
        e2e_seconds=time.monotonic() - exchange.call.arrived_at,
        time_to_first_token_seconds=exchange.clock.time_to_first_token_seconds(),
        inter_token_seconds=inter_token_seconds(exchange) if outcome is Outcome.OK else (),
        usage=exchange.usage,
        timings=exchange.timings,
        leg_seconds=exchange.served.leg_seconds() if exchange.served is not None else {},
    )


def record_of(exchange: Exchange) -> Record:
    strategy, route = exchange.strategy, exchange.route
    return Record(
        request_id=exchange.call.request_id,
        client_request_id=exchange.call.client_request_id,
        started_at=exchange.started_at,
        dialect=exchange.call.dialect.name,
        model=_short(exchange.model),
        stream=exchange.stream,
        key_name=exchange.call.key.name if exchange.call.key else None,
        backend=route.target if route else None,
        upstream_model=_short(route.upstream_model) if route else None,
        cache_mode=exchange.served_mode,
        cache_mode_requested=_short(strategy.requested) if strategy else None,
        cache_mode_source=strategy.source.value if strategy else None,
        cache_mode_reason=route.reason if route else None,
        cache_variant=exchange.variant,
        instance=exchange.instance or None,
        instance_reason=_short(exchange.instance_reason) or None,
        attempts=tuple(exchange.attempts),
        outcome=(exchange.outcome or Outcome.ERROR).value,
        status=exchange.status,
        error_code=(exchange.error.code or type(exchange.error).__name__) if exchange.error else None,
        finish_reason=_short(exchange.finish_reason),
        cost_usd=exchange.cost_usd,
        notices=tuple(exchange.notices),
        timings=timing_facts(exchange),
    )


def _phase_facts(timings: Timings, mode: str | None) -> dict[str, Any]:
    facts = msgspec.structs.asdict(timings)
    if mode == CacheMode.MERGED:
        return {name: value for name, value in facts.items() if name not in _SPLIT_FACTS}
    overlap = timings.transfer_overlapped_seconds / timings.transfer_seconds if timings.transfer_seconds > 0 else None
    return {**facts, "transfer_overlap_ratio": overlap}


def _leg_facts(served: Served) -> dict[str, Any]:
    """Of a prefill and a decode server, each timed from here."""
    found = {
        "queue_seconds": served.queue_seconds,
        "prefill_seconds": served.prefill_seconds,
        "decode_first_seconds": served.decode_first_seconds,
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _short(text: str | None) -> str | None:
    """What others chose, at a length at which many records stay small."""
    return text if text is None or len(text) <= _MAX_KEPT else text[:_MAX_KEPT] + "..."
