"""The state of one request while it is answered: what is known so far, as headers, timings and a record."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import (
    BodyTooLarge,
    BudgetExhausted,
    ContextLengthExceeded,
    GatewayError,
    InvalidRequest,
    KeyForbids,
    KVPoolTooSmall,
    ModelNotFound,
    Overloaded,
    RateLimited,
    TargetUnavailable,
    UnsupportedEncoding,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.core.types import CacheMode, CacheStrategy, FinishReason, Route
from gateway.dialects.base import Renderer
from gateway.metrics import RequestFigures
from gateway.records.store import AttemptRecord, Record
from gateway.service.call import Call
from gateway.service.clock import TokenClock, summary
from gateway.service.key_limits import Permit
from gateway.service.truncation import NOTICE, looks_truncated
from gateway.upstreams.base import Served
from gateway.upstreams.litellm_sdk.price_book import PriceBook

logger = logging.getLogger(__name__)


class Outcome(StrEnum):
    OK = "ok"
    INVALID = "invalid"  # refused, and the client's to mend
    OVERLOADED = "overloaded"
    TIMEOUT = "timeout"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


_INVALID = (
    InvalidRequest,
    ModelNotFound,
    ContextLengthExceeded,
    KVPoolTooSmall,
    BodyTooLarge,
    UnsupportedEncoding,
    KeyForbids,
)
_NOT_PRINTABLE = re.compile(r"[^ -~]")
_MAX_KEPT = 200  # characters of a name in a record
_MAX_HEADER = 2000  # characters of one header value; some clients refuse longer heads


def outcome_of(error: GatewayError) -> Outcome:
    if isinstance(error, _INVALID):
        return Outcome.INVALID
    if isinstance(error, Overloaded | TargetUnavailable | RateLimited | BudgetExhausted):
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
        self.accepted = False  # whoever answers has taken it: an error is no longer likely
        self.on_accepted: Callable[[], object] | None = None
        self.begun = False  # something of the answer has come: it is never asked for again
        self.num_attempts = 0
        self.attempts: list[AttemptRecord] = []  # those that are over
        self.instance = ""  # of the engine, that took the request
        self.instance_reason = ""  # why it was chosen among several
        self.served: Served | None = None  # what an upstream of several servers says beside the answer
        self.translated = False  # answered by an upstream of another API than the client's
        self.renderer: Renderer | None = None
        self.keep: Callable[[str, Any], object] | None = None  # remembers a finished conversation under its id
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
        self.permit: Permit | None = None  # of the client's key
        self.limit_headers: Callable[[], dict[str, str]] | None = None  # what is left of that key's limits
        self.prices: PriceBook | None = None
        self.cost_usd: float | None = None  # None = not known
        self._notices: list[str] = []

    def note(self, notices: Iterable[str]) -> None:
        self._notices.extend(notice for notice in notices if notice not in self._notices)

    def finish(self, reason: FinishReason | str, usage: Usage | None, timings: Timings | None) -> None:
        self.finish_reason = str(reason)
        self.usage = usage if usage is not None else self.usage
        self.timings = timings
        self.outcome = Outcome.OK

    def await_attempt(self) -> None:
        """Nobody has taken the request, or it is to go out again: meanwhile the client is promised the usual type."""
        self.content_type = self.call.dialect.stream_type if self.stream else "application/json"
        self.accepted = False

    def begin_attempt(self) -> None:
        """Forget what an earlier attempt has left."""
        self.begun = False
        self.upstream_headers = {}
        self.usage, self.timings = None, None
        self.instance = self.instance_reason = ""
        self.served = None
        self.sent_to_upstream_at = time.monotonic()
        self.num_attempts += 1

    def serve(self, served: Served) -> None:
        self.served = served
        self.instance, self.instance_reason = served.instance, served.instance_reason
        self.note(served.notices)

    def accept(self) -> None:
        self.accepted = True
        if self.on_accepted is not None:
            self.on_accepted()

    @property
    def has_output(self) -> bool:
        """Whether the answer has begun, be it only here: asking again would do the same work twice."""
        return self.begun or self.clock.num_chunks > 0

    def num_notices(self) -> int:
        return len(self._notices)

    def drop_notices(self, num_kept: int) -> None:
        """Those of a target that doesn't answer after all."""
        del self._notices[num_kept:]

    def remember(self) -> None:
        """Called when the answer is complete, before the client knows: its next request may refer to this one."""
        said = self.renderer.conversation() if self.renderer is not None and self.keep is not None else None
        if said is not None and self.keep is not None:
            self.keep(*said)

    def check_prompt(self) -> None:
        """Of an upstream elsewhere, whose count is all that is known of what it has read."""
        if self.usage is not None and looks_truncated(self.call.body.data, self.usage.prompt_tokens):
            logger.warning("request %s: %s", self.call.request_id, NOTICE)
            self.note((NOTICE,))

    def fail(self, error: GatewayError) -> None:
        """The first failure counts; what follows from it does not."""
        if self.error is None:
            self.error = error
            self.outcome = outcome_of(error)
            self._correct_last_attempt(self.outcome)

    def _correct_last_attempt(self, outcome: Outcome) -> None:
        """One that was broken off looked as if the client had left. It hasn't: it is told this."""
        if self.attempts and self.attempts[-1].outcome == Outcome.CLIENT_GONE:
            self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], outcome=outcome.value)

    def headers(self) -> dict[str, str]:
        """What the client is told about how it is served, as far as it is known now."""
        found: dict[str, str | None] = {**self.upstream_headers, "X-Cache-Mode": self.served_mode}
        if self.strategy is not None:
            found["X-Cache-Mode-Requested"] = self.strategy.requested or "default"
            found["X-Cache-Mode-Source"] = self.strategy.source.value
        found["X-Cache-Variant"] = self.variant
        found["X-Cache-Instance"] = self.instance or None
        found["X-Cache-Instance-Reason"] = self.instance_reason or None
        if self.route is not None:
            found["X-Cache-Mode-Reason"] = self.route.reason
            found["X-Cache-Backend"] = self.route.target
        found["X-Kvgate-Attempts"] = str(self.num_attempts) if self.num_attempts > 1 else None
        found["X-Kvgate-Notice"] = "; ".join(self._notices) or None
        found["Server-Timing"] = self._server_timing() or None
        if self.limit_headers is not None and (own := self.limit_headers()):  # of this key, not of the one beyond
            others = {name: value for name, value in found.items() if not name.lower().startswith("x-ratelimit-")}
            found = {**others, **own}
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
        if self.served is not None:
            phases["queue"] = self.served.queue_seconds
            phases["prefill"] = self.served.prefill_seconds
            phases["decode_first"] = self.served.decode_first_seconds
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
        if self.served is not None:
            facts |= _leg_facts(self.served)
        return facts | (_phase_facts(self.timings, self.served_mode) if self.timings is not None else {})

    def inter_token_seconds(self) -> list[float]:
        return list(self.clock.inter_token_seconds(self.usage.completion_tokens if self.usage else None))

    def figures(self) -> RequestFigures:
        outcome = self.outcome or Outcome.ERROR
        return RequestFigures(
            dialect=self.call.dialect.name,
            cache_mode=self.served_mode or "none",
            backend=self.route.target if self.route else "none",
            outcome=outcome.value,
            cost_usd=self.cost_usd,
            e2e_seconds=time.monotonic() - self.call.arrived_at,
            time_to_first_token_seconds=self.clock.time_to_first_token_seconds(),
            inter_token_seconds=self.inter_token_seconds() if outcome is Outcome.OK else (),
            usage=self.usage,
            timings=self.timings,
            leg_seconds=self.served.leg_seconds() if self.served is not None else {},
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
            instance=self.instance or None,
            instance_reason=_short(self.instance_reason) or None,
            attempts=tuple(self.attempts),
            outcome=(self.outcome or Outcome.ERROR).value,
            status=self.status,
            error_code=(self.error.code or type(self.error).__name__) if self.error else None,
            finish_reason=_short(self.finish_reason),
            cost_usd=self.cost_usd,
            notices=tuple(self._notices),
            timings=self.timing_facts(),
        )


# What only split has: said of a merged answer, a 0 would look like a fact.
_SPLIT_FACTS = frozenset({
    "transfer_seconds", "transfer_overlapped_seconds", "transfer_bytes", "slot_wait_seconds", "decode_wait_seconds",
    "first_decode_step_seconds", "prefill_hit_tokens", "computed_tokens", "decode_held_tokens", "transferred_tokens",
})  # fmt: skip


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


def header_value(text: str) -> str:
    """Printable ASCII in one line, cut where clients would refuse it."""
    safe = text if text.isascii() and text.isprintable() else _NOT_PRINTABLE.sub("?", text)
    return safe if len(safe) <= _MAX_HEADER else safe[: _MAX_HEADER - 3] + "..."
