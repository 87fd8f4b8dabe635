"""Domain errors as HTTP: one table for status and type; the shape of the body is the asked API's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from aiohttp import web

from gateway.core import errors
from gateway.core.errors import GatewayError
from gateway.core.retry_after import told_again
from gateway.dialects.base import Dialect, ErrorFacts
from gateway.dialects.sniff import error_facts

# Types are those of the API that clients know: `invalid_request_error` is never retried, the last ones are.
STATUS: dict[type[GatewayError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    errors.ContextLengthExceeded: (400, "invalid_request_error"),
    errors.KVPoolTooSmall: (400, "invalid_request_error"),
    errors.Unauthorized: (401, "authentication_error"),
    errors.Forbidden: (403, "permission_error"),
    errors.KeyForbids: (403, "permission_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.ModelNotFound: (404, "invalid_request_error"),
    errors.MethodNotAllowed: (405, "invalid_request_error"),
    errors.BodyTooLarge: (413, "invalid_request_error"),
    errors.UnsupportedEncoding: (415, "invalid_request_error"),
    errors.Overloaded: (429, "rate_limit_error"),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.BudgetExhausted: (429, "insufficient_quota"),
    errors.InternalError: (500, "server_error"),
    errors.UpstreamError: (502, "upstream_error"),  # its own status wins
    errors.UpstreamGone: (502, "upstream_error"),
    errors.UpstreamUnreachable: (502, "upstream_error"),
    errors.ModeUnavailable: (503, "service_unavailable_error"),
    errors.TargetUnavailable: (503, "service_unavailable_error"),
    errors.UpstreamTimeout: (504, "timeout_error"),
    errors.LoopDetected: (508, "upstream_error"),
}


def facts_of(error: GatewayError, request_id: str = "") -> ErrorFacts:
    """What a dialect needs in order to tell the error."""
    status, kind = STATUS[type(error)]
    facts = ErrorFacts(status, kind, error.message, error.param, error.code, request_id, error.retry_after_seconds)
    if not isinstance(error, errors.UpstreamError):
        return facts
    facts = replace(facts, status=error.status, kind=_type_of_status(error.status))
    if error.body is None:
        return facts
    said = error_facts(error.body)
    return replace(facts, message=said.message, kind=said.kind or facts.kind, code=said.code, param=said.param)


def _type_of_status(status: int) -> str:
    known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return known.get(status, "upstream_error" if status >= 500 else "invalid_request_error")


def error_response(
    error: GatewayError, dialect: Dialect, headers: Mapping[str, str] | None = None, request_id: str = ""
) -> web.Response:
    """An upstream's own error as it came, where it is of the API that the client speaks."""
    facts = facts_of(error, request_id)
    as_it_came = error.body if isinstance(error, errors.UpstreamError) else None
    status = facts.status if as_it_came is not None else dialect.error_status(facts)
    response = web.Response(
        status=status,
        body=as_it_came if as_it_came is not None else dialect.error_body(facts),
        content_type="application/json",
        headers={**(headers or {}), **_headers(error, facts.status)},
    )
    if isinstance(error, errors.BodyTooLarge):
        response.force_close()
    return response


def _headers(error: GatewayError, status: int) -> dict[str, str]:
    written = error.retry_after if isinstance(error, errors.UpstreamError) else None
    found = told_again({"Retry-After": written}, time.time()) if written else {}
    if not found and (error.retry_after_seconds is not None or status == 429):
        found["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds or 1)))
    if isinstance(error, errors.BudgetExhausted):
        found["X-Should-Retry"] = "false"  # clients would otherwise try three times at once
    if isinstance(error, errors.MethodNotAllowed):
        found["Allow"] = ", ".join(error.allowed)
    if isinstance(error, errors.Unauthorized):
        found["WWW-Authenticate"] = "Bearer"
    return found
