"""The state of one request while it is answered: what is known so far, as headers, timings and a record."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    KVPoolTooSmall,
    ModelNotFound,
    Overloaded,
    UnsupportedEncoding,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.core.types import CacheStrategy, FinishReason, Route
from gateway.metrics import RequestFigures
from gateway.records.store import Record
from gateway.service.call import Call
from gateway.service.clock import TokenClock, summary


class Outcome(StrEnum):
    OK = "ok"
    INVALID = "invalid"  # refused, and the client's to mend
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


_INVALID = (InvalidRequest, ModelNotFound, ContextLengthExceeded, KVPoolTooSmall, BodyTooLarge, UnsupportedEncoding)
_NOT_PRINTABLE = re.compile(r"[^ -~]")
_MAX_KEPT = 200  # characters of a name in a record
_MAX_HEADER = 2000  # characters of one header value; some clients refuse longer heads


def outcome_of(error: GatewayError) -> Outcome:
    if isinstance(error, _INVALID):
        return Outcome.INVALID
    if isinstance(error, Overloaded):
        return Outcome.OVERLOADED
    if isinstance(error, UpstreamTimeout):
        return Outcome.TIMEOUT
    if isinstance(error, UpstreamError):
        return Outcome.OVERLOADED if error.status == 429 else Outcome.INVALID if error.status < 500 else Outcome.ERROR
    return Outcome.ERROR


class Exchange:
    """Filled in as the request proceeds. Whoever learns a fact sets it here; nobody keeps a copy."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.started_at = time.time()
        self.clock = TokenClock(call.arrived_at)
        self.stream = False
        self.model: str | None = None
        self.strategy: CacheStrategy | None = None
        self.route: Route | None = None
        self.served_mode: str | None = None  # a mode, or "unknown" where an upstream doesn't say
        self.variant: str | None = None  # KV dtype of the engine variant that serves; None = the main engine
        self.content_type = "application/json"
        self.status: int | None = None
        self.headers_sent = False
        self.upstream_headers: dict[str, str] = {}
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.outcome: Outcome | None = None
        self.error: GatewayError | None = None
        self.sent_to_upstream_at: float | None = None
        self._notices: list[str] = []

    def note(self, notices: Iterable[str]) -> None:
        self._notices.extend(notice for notice in notices if notice not in self._notices)

    def finish(self, reason: FinishReason | str, usage: Usage | None, timings: Timings | None) -> None:
        self.finish_reason = str(reason)
        self.usage = usage if usage is not None else self.usage
        self.timings = timings
        self.outcome = Outcome.OK

    def fail(self, error: GatewayError) -> None:
        """The first failure counts; what follows from it does not."""
        if self.error is None:
            self.error = error
            self.outcome = outcome_of(error)

    def headers(self) -> dict[str, str]:
        """What the client is told about how it is served, as far as it is known now."""
        found: dict[str, str | None] = {**self.upstream_headers, "X-Cache-Mode": self.served_mode}
        if self.strategy is not None:
            found["X-Cache-Mode-Requested"] = self.strategy.requested or "default"
            found["X-Cache-Mode-Source"] = self.strategy.source.value
        found["X-Cache-Variant"] = self.variant
        if self.route is not None:
            found["X-Cache-Mode-Reason"] = self.route.reason
            found["X-Cache-Backend"] = self.route.target
        found["X-Kvgate-Notice"] = "; ".join(self._notices) or None
        found["Server-Timing"] = self._server_timing() or None
        return {name: header_value(value) for name, value in found.items() if value is not None}

    def _server_timing(self) -> str:
        phases: dict[str, float | None] = {}
        if self.sent_to_upstream_at is not None:
            phases["gateway"] = self.sent_to_upstream_at - self.call.arrived_at
        if self.timings is not None:
            phases["queue"] = self.timings.queue_seconds
            phases["prefill"] = self.timings.prefill_seconds
            if self.timings.transfer_bytes or self.timings.transfer_seconds:
                phases["kv_transfer"] = self.timings.transfer_seconds
            phases["decode"] = self.timings.decode_seconds
        if self.stream or self.timings is not None:  # an answer in one piece from elsewhere has no first token
            phases["ttft"] = self.clock.time_to_first_token_seconds()
        phases["total"] = time.monotonic() - self.call.arrived_at
        return ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in phases.items() if seconds is not None)

    def timing_facts(self) -> dict[str, Any]:
        """Everything known about where the time went, by the names of metrics."""
        facts: dict[str, Any] = {"e2e_seconds": time.monotonic() - self.call.arrived_at}
        if self.stream or self.timings is not None:
            facts["time_to_first_token_seconds"] = self.clock.time_to_first_token_seconds()
        gaps = self.inter_token_seconds()
        if gaps:
            facts["inter_token_seconds"] = summary(gaps)
        if self.usage is not None:
            facts["prompt_tokens"] = self.usage.prompt_tokens
            facts["completion_tokens"] = self.usage.completion_tokens
            facts["cached_tokens"] = self.usage.cached_tokens
        return facts | (_phase_facts(self.timings) if self.timings is not None else {})

    def inter_token_seconds(self) -> list[float]:
        return list(self.clock.inter_token_seconds(self.usage.completion_tokens if self.usage else None))

    def figures(self) -> RequestFigures:
        outcome = self.outcome or Outcome.ERROR
        return RequestFigures(
            dialect=self.call.dialect.name,
            cache_mode=self.served_mode or "none",
            backend=self.route.target if self.route else "none",
            outcome=outcome.value,
            e2e_seconds=time.monotonic() - self.call.arrived_at,
            time_to_first_token_seconds=self.clock.time_to_first_token_seconds(),
            inter_token_seconds=self.inter_token_seconds() if outcome is Outcome.OK else (),
            usage=self.usage,
            timings=self.timings,
        )

    def record(self) -> Record:
        strategy, route = self.strategy, self.route
        return Record(
            request_id=self.call.request_id,
            client_request_id=self.call.client_request_id,
            started_at=self.started_at,
            dialect=self.call.dialect.name,
            model=_short(self.model),
            stream=self.stream,
            key_name=self.call.key.name if self.call.key else None,
            backend=route.target if route else None,
            upstream_model=_short(route.upstream_model) if route else None,
            cache_mode=self.served_mode,
            cache_mode_requested=_short(strategy.requested) if strategy else None,
            cache_mode_source=strategy.source.value if strategy else None,
            cache_mode_reason=route.reason if route else None,
            cache_variant=self.variant,
            outcome=(self.outcome or Outcome.ERROR).value,
            status=self.status,
            error_code=(self.error.code or type(self.error).__name__) if self.error else None,
            finish_reason=_short(self.finish_reason),
            notices=tuple(self._notices),
            timings=self.timing_facts(),
        )


def _phase_facts(timings: Timings) -> dict[str, Any]:
    overlap = timings.transfer_overlapped_seconds / timings.transfer_seconds if timings.transfer_seconds > 0 else None
    return {**msgspec.structs.asdict(timings), "transfer_overlap_ratio": overlap}


def _short(text: str | None) -> str | None:
    """What others chose, at a length at which many records stay small."""
    return text if text is None or len(text) <= _MAX_KEPT else text[:_MAX_KEPT] + "..."


def header_value(text: str) -> str:
    """Printable ASCII in one line, cut where clients would refuse it."""
    safe = text if text.isascii() and text.isprintable() else _NOT_PRINTABLE.sub("?", text)
    return safe if len(safe) <= _MAX_HEADER else safe[: _MAX_HEADER - 3] + "..."
