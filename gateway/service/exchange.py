"""The state of one request while it is answered: what is known of it so far. Others tell it: see exchange_headers."""

from __future__ import annotations

import logging
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
from gateway.core.types import CacheStrategy, FinishReason, Route
from gateway.dialects.base import Renderer
from gateway.records.store import AttemptRecord
from gateway.service.call import Call
from gateway.service.clock import TokenClock
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
        self.is_out_of_time: Callable[[], bool] = lambda: False  # it took longer than any request may
        self.notices: list[str] = []  # told to the client and kept in the record

    def note(self, notices: Iterable[str]) -> None:
        self.notices.extend(notice for notice in notices if notice not in self.notices)

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

    def count_resend(self) -> None:
        """It went out once more within an attempt: over a connection that seemed to be kept, and had just ended."""
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
        return len(self.notices)

    def drop_notices(self, num_kept: int) -> None:
        """Those of a target that doesn't answer after all."""
        del self.notices[num_kept:]

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
