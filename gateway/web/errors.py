"""Domain errors as HTTP: one table for status and type, one shape of body."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.core import errors
from gateway.core.errors import GatewayError

# Types are those of the API that clients know: `invalid_request_error` is never retried, the last ones are.
STATUS: dict[type[GatewayError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    errors.ContextLengthExceeded: (400, "invalid_request_error"),
    errors.KVPoolTooSmall: (400, "invalid_request_error"),
    errors.Unauthorized: (401, "authentication_error"),
    errors.Forbidden: (403, "permission_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.ModelNotFound: (404, "invalid_request_error"),
    errors.MethodNotAllowed: (405, "invalid_request_error"),
    errors.BodyTooLarge: (413, "invalid_request_error"),
    errors.UnsupportedEncoding: (415, "invalid_request_error"),
    errors.Overloaded: (429, "rate_limit_error"),
    errors.InternalError: (500, "server_error"),
    errors.UpstreamError: (502, "upstream_error"),  # its own status wins
    errors.UpstreamGone: (502, "upstream_error"),
    errors.UpstreamUnreachable: (502, "upstream_error"),
    errors.ModeUnavailable: (503, "service_unavailable_error"),
    errors.UpstreamTimeout: (504, "timeout_error"),
    errors.LoopDetected: (508, "upstream_error"),
}


def status_of(error: GatewayError) -> int:
    return error.status if isinstance(error, errors.UpstreamError) else STATUS[type(error)][0]


def error_body(error: GatewayError) -> bytes:
    """The error in the API's shape; an upstream's own error as it came."""
    if isinstance(error, errors.UpstreamError) and error.body is not None:
        return error.body
    kind = STATUS[type(error)][1]
    if isinstance(error, errors.UpstreamError):
        kind = _type_of_status(error.status)
    fields: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def _type_of_status(status: int) -> str:
    known = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return known.get(status, "upstream_error" if status >= 500 else "invalid_request_error")


def error_frame(error: GatewayError) -> bytes:
    """The error inside a stream that has begun. One line, whatever an upstream's body looked like."""
    body = error_body(error)
    try:
        body = msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        body = error_body(errors.UpstreamGone(error.message))
    return b"data: " + body + b"\n\n"


def error_response(error: GatewayError, headers: Mapping[str, str] | None = None) -> web.Response:
    extra = dict(headers or {})
    if isinstance(error, errors.UpstreamError) and error.retry_after:
        extra["Retry-After"] = error.retry_after
    elif error.retry_after_seconds is not None:
        extra["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    elif status_of(error) == 429:
        extra.setdefault("Retry-After", "1")
    if isinstance(error, errors.MethodNotAllowed):
        extra["Allow"] = ", ".join(error.allowed)
    if isinstance(error, errors.Unauthorized):
        extra["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        status=status_of(error), body=error_body(error), content_type="application/json", headers=extra
    )
    if isinstance(error, errors.BodyTooLarge):
        response.force_close()
    return response
