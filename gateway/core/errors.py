"""One tree of errors, raised where the fact is known. Knows nothing of HTTP: `web.errors` maps each class to a status.

A message says what happened, what was expected and what to do. It never carries a key.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_SHOWN = 200  # characters of a name that a client chose


class GatewayError(Exception):
    """Anything a client is told. `param` names the field at fault, `code` is the API's machine-readable code."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(GatewayError):
    """The request is not valid: bad JSON, a bad field, a bad cache strategy."""


class BodyTooLarge(GatewayError):
    code = "request_too_large"


class UnsupportedEncoding(GatewayError):
    """A Content-Encoding or charset that isn't spoken here."""


class Unauthorized(GatewayError):
    code = "invalid_api_key"


class Forbidden(GatewayError):
    """Host or origin not allowed."""


class NotFound(GatewayError):
    """No such path or record."""


class MethodNotAllowed(GatewayError):
    def __init__(self, message: str, *, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class ModelNotFound(GatewayError):
    code = "model_not_found"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        shown = model if len(model) <= _MAX_SHOWN else model[:_MAX_SHOWN] + "..."
        super().__init__(f"Model {shown!r} is not served here. Available: {', '.join(known) or 'none'}.", param="model")
        self.known = tuple(known)


class ContextLengthExceeded(GatewayError):
    code = "context_length_exceeded"


class KVPoolTooSmall(GatewayError):
    """The prompt can never fit the KV pool, however long it waits."""

    code = "kv_pool_too_small"


class Overloaded(GatewayError):
    """The queue is full; try again after `retry_after_seconds`."""

    code = "queue_full"


class RateLimited(GatewayError):
    """The client's key has used up a limit of its own; some of it comes back after `retry_after_seconds`."""

    code = "rate_limit_exceeded"


class BudgetExhausted(GatewayError):
    """The client's key has spent what it may; `retry_after_seconds` until its budget begins anew, if it does."""

    code = "insufficient_quota"


class KeyForbids(GatewayError):
    """The client's key may not use this model or this mode."""

    code = "key_not_allowed"


class ModeUnavailable(GatewayError):
    """The mode asked for can't be served now, and no other is served in its place.

    `is_restarting`: what serves it was up before, and is being started again.
    """

    code = "mode_unavailable"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, is_restarting: bool = False) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.is_restarting = is_restarting


CUT = "The upstream broke the connection before the answer was complete. What came so far is not the whole answer."


class UpstreamGone(GatewayError):
    """What was answering died or broke the connection."""

    code = "upstream_gone"


class UpstreamTimeout(GatewayError):
    code = "upstream_timeout"


class UpstreamUnreachable(GatewayError):
    """No connection came about. `for_good`: trying again won't help, since an address or a certificate is wrong."""

    code = "upstream_unreachable"

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class TargetUnavailable(GatewayError):
    """An upstream that has failed so often that it is left alone for a while."""

    code = "target_unavailable"


class LoopDetected(GatewayError):
    """The request has come back to this gateway through its own upstream."""

    code = "loop_detected"


class UpstreamError(GatewayError):
    """An upstream answered with an error of its own, which is passed on: its status, its body, its Retry-After.

    `is_final`: asking the same upstream again is useless, as it says itself or as we know.
    """

    code = "upstream_error"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        body: bytes | None = None,
        retry_after: str | None = None,
        retry_after_seconds: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.status = status
        self.body = body  # JSON of the API's error shape; None = built from the message
        self.retry_after = retry_after  # as it was written
        self.is_final = is_final


class InternalError(GatewayError):
    """Our own fault; the log has the details."""

    code = "internal_error"
