"""Errors in the words of the Gemini API: statuses, details by which clients wait, the wording of an overflow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core import errors
from gateway.dialects.base import ErrorFacts
from gateway.dialects.gemini import DIALECT
from gateway.web.errors import STATUS, facts_of

TYPE = "type.googleapis.com/google.rpc."


def error_of(facts: ErrorFacts) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(DIALECT.error_body(facts))["error"]
    return error


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (405, "INVALID_ARGUMENT"),
        (413, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (502, "UNAVAILABLE"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
        (508, "INTERNAL"),
    ],
)
def test_a_status_and_its_name(status: int, name: str) -> None:
    facts = ErrorFacts(status, "kind", "what happened")
    assert error_of(facts) == {"code": status, "message": "what happened", "status": name}
    assert DIALECT.error_status(facts) == status


def test_every_status_of_the_gateway_has_a_name_that_is_no_success() -> None:
    names = {error_of(ErrorFacts(status, kind, "m"))["status"] for status, kind in STATUS.values()}
    assert "OK" not in names
    assert all(name.isupper() for name in names)


def test_code_field_and_time_to_wait_are_details() -> None:
    said = error_of(ErrorFacts(400, "k", "m", param="contents", code="some_code", request_id="r1"))
    assert said["details"] == [
        {"@type": f"{TYPE}ErrorInfo", "reason": "SOME_CODE", "domain": "kvgate", "metadata": {"requestId": "r1"}},
        {"@type": f"{TYPE}BadRequest", "fieldViolations": [{"field": "contents", "description": "m"}]},
    ]
    waits = error_of(facts_of(errors.Overloaded("Full.", retry_after_seconds=1.5)))
    assert (waits["code"], waits["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert {"@type": f"{TYPE}RetryInfo", "retryDelay": "1.5s"} in waits["details"]


@pytest.mark.parametrize(
    ("message", "code", "expected"),
    [
        (
            "This model's maximum context length is 8192 tokens, and your prompt has 9000 tokens.",
            "context_length_exceeded",
            "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
        ),
        (
            "request (9000 tokens) exceeds the available context size (8192 tokens)",
            None,
            "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
        ),
        (
            "prompt is too long",
            None,
            "The input token count exceeds the maximum number of tokens allowed: prompt is too long",
        ),
        (
            "The input token count (5) exceeds the maximum number of tokens allowed (4).",
            None,
            "The input token count (5) exceeds the maximum number of tokens allowed (4).",
        ),
    ],
)
def test_rv_an_overflow_is_worded_as_clients_know_it(message: str, code: str | None, expected: str) -> None:
    said = error_of(ErrorFacts(400, "invalid_request_error", message, code=code))
    assert (said["code"], said["status"], said["message"]) == (400, "INVALID_ARGUMENT", expected)


def test_a_pool_that_is_too_small_keeps_its_own_explanation() -> None:
    message = "maximum context length is 100 tokens; your prompt has 200 tokens. The KV pool is too small."
    said = error_of(ErrorFacts(400, "k", message, code="kv_pool_too_small"))["message"]
    assert said.startswith("The input token count (200) exceeds the maximum number of tokens allowed (100).")
    assert said.endswith("The KV pool is too small.")
