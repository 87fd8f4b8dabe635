"""Errors in the shape and with the statuses of the Gemini API. Pure.

Its clients decide by status, and by the details of it, whether and when to try again.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.dialects.base import ErrorFacts
from gateway.dialects.overflow import Wording, worded

DOMAIN = "kvgate"  # of the reasons below; Google's own domains make Gemini CLI look for accounts and quotas
_TYPE_URL = "type.googleapis.com/google.rpc."
_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
# Clients know by these words that they must shorten the conversation.
_OVERFLOW = Wording(
    known=re.compile(r"input token count \(?\d+\)? exceeds the maximum", re.IGNORECASE),
    lead="The input token count exceeds the maximum number of tokens allowed",
    sentence="The input token count ({num_tokens}) exceeds the maximum number of tokens allowed ({maximum}).",
)


def error_status_name(facts: ErrorFacts) -> str:
    return _STATUS.get(facts.status, "INVALID_ARGUMENT" if facts.status < 500 else "INTERNAL")


def error_object(facts: ErrorFacts) -> dict[str, Any]:
    details = _details(facts)
    error = {"code": facts.status, "message": worded(facts, _OVERFLOW), "status": error_status_name(facts)}
    return {"error": error | ({"details": details} if details else {})}


def error_body(facts: ErrorFacts) -> bytes:
    return msgspec.json.encode(error_object(facts))


def _details(facts: ErrorFacts) -> list[dict[str, Any]]:
    """Code, field and time to wait, each where that API has it."""
    details: list[dict[str, Any]] = []
    if facts.code:
        info = {"@type": f"{_TYPE_URL}ErrorInfo", "reason": facts.code.upper(), "domain": DOMAIN}
        details.append(info | ({"metadata": {"requestId": facts.request_id}} if facts.request_id else {}))
    if facts.param and facts.status == 400:
        violation = {"field": facts.param, "description": facts.message}
        details.append({"@type": f"{_TYPE_URL}BadRequest", "fieldViolations": [violation]})
    if facts.retry_after_seconds:
        details.append({"@type": f"{_TYPE_URL}RetryInfo", "retryDelay": f"{facts.retry_after_seconds:.9g}s"})
    return details
