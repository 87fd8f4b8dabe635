"""Errors in the shape and with the types of the Anthropic API. Pure.

Its clients decide by type and status whether to try again, and by one sentence whether to shorten the conversation.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.dialects.base import ErrorFacts
from gateway.dialects.overflow import Wording, worded

OVERLOADED_STATUS = 529

_TYPE_OF_CODE = {
    "queue_full": "overloaded_error",
    "mode_unavailable": "overloaded_error",
    "request_timeout": "timeout_error",
    "upstream_timeout": "timeout_error",
    "insufficient_quota": "billing_error",
}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
_STATUS_OF_TYPE = {"overloaded_error": OVERLOADED_STATUS, "timeout_error": 504, "billing_error": 402}
# What an upstream's error inside a stream calls itself, where the status says no more than that it failed.
_NAMED = frozenset(
    {"authentication_error", "permission_error", "rate_limit_error", "overloaded_error", "timeout_error"}
)

# Claude Code knows by these words that it must compact the conversation.
_OVERFLOW = Wording(
    known=re.compile(r"prompt is too long: \d+ tokens > \d+ maximum"),
    lead="prompt is too long",
    sentence="prompt is too long: {num_tokens} tokens > {maximum} maximum",
)


def error_type(facts: ErrorFacts) -> str:
    if facts.code in _TYPE_OF_CODE:
        return _TYPE_OF_CODE[facts.code]
    if facts.status in _TYPE_OF_STATUS:
        return _TYPE_OF_STATUS[facts.status]
    if facts.status < 500:
        return "invalid_request_error"
    return facts.kind if facts.kind in _NAMED else "api_error"  # never a client's fault: it would not be tried again


def error_status(facts: ErrorFacts) -> int:
    return _STATUS_OF_TYPE.get(error_type(facts), facts.status)


def error_object(facts: ErrorFacts) -> dict[str, Any]:
    error = {"type": error_type(facts), "message": worded(facts, _OVERFLOW)}
    return {"type": "error", "error": error, "request_id": facts.request_id or None}


def error_body(facts: ErrorFacts) -> bytes:
    return msgspec.json.encode(error_object(facts))
