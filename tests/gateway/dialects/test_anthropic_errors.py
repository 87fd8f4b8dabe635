"""Errors of the Anthropic dialect: type, status and wording that its clients decide by."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import types
from anthropic_support import make_renderer, read_events
from generated_answers import call, text
from pydantic import TypeAdapter

from gateway.core.types import Delta
from gateway.dialects.anthropic_errors import error_body, error_status
from gateway.dialects.base import ErrorFacts


def facts(status: int, kind: str = "invalid_request_error", message: str = "no", **options: Any) -> ErrorFacts:
    return ErrorFacts(status, kind, message, **options)


@pytest.mark.parametrize(
    ("given", "told", "status"),
    [
        (facts(400), "invalid_request_error", 400),
        (facts(405), "invalid_request_error", 405),
        (facts(415), "invalid_request_error", 415),
        (facts(422), "invalid_request_error", 422),
        (facts(401, "authentication_error", code="invalid_api_key"), "authentication_error", 401),
        (facts(403, "permission_error"), "permission_error", 403),
        (facts(404, "not_found_error"), "not_found_error", 404),
        (facts(404, code="model_not_found"), "not_found_error", 404),
        (facts(413, code="request_too_large"), "request_too_large", 413),
        (facts(429, "rate_limit_error"), "rate_limit_error", 429),
        (facts(429, "rate_limit_error", code="queue_full"), "overloaded_error", 529),
        (facts(503, "service_unavailable_error", code="mode_unavailable"), "overloaded_error", 529),
        (facts(503, "upstream_error"), "overloaded_error", 529),
        (facts(529, "upstream_error"), "overloaded_error", 529),
        (facts(500, "server_error", code="internal_error"), "api_error", 500),
        (facts(502, "upstream_error", code="upstream_gone"), "api_error", 502),
        (facts(508, "upstream_error", code="loop_detected"), "api_error", 508),
        (facts(504, "timeout_error", code="upstream_timeout"), "timeout_error", 504),
    ],
)
def test_every_error_has_the_apis_type_and_status(given: ErrorFacts, told: str, status: int) -> None:
    body = json.loads(error_body(given))

    assert (body["error"]["type"], error_status(given)) == (told, status)
    assert body["type"] == "error"


def test_an_error_carries_its_request() -> None:
    assert json.loads(error_body(facts(400, request_id="r1")))["request_id"] == "r1"
    assert json.loads(error_body(facts(400)))["request_id"] is None


def test_errors_are_those_of_the_vendors_types() -> None:
    for status in (400, 401, 402, 403, 404, 429, 500, 502, 503, 504):
        TypeAdapter(types.ErrorResponse).validate_json(error_body(facts(status, "upstream_error")))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (facts(502, "invalid_request_error", code="request_timeout"), "timeout_error"),
        (facts(502, "invalid_request_error"), "api_error"),
        (facts(502, "upstream_error", code="upstream_gone"), "api_error"),
        (facts(400, "invalid_request_error", code="request_timeout"), "timeout_error"),
    ],
)
def test_st_29_a_fault_of_the_transport_is_of_a_type_that_is_tried_again(given: ErrorFacts, told: str) -> None:
    assert json.loads(error_body(given))["error"]["type"] == told
    assert error_status(given) >= 500


@pytest.mark.parametrize("deltas", [[], [text("a")], [call(0, "f", '{"a":')]])
def test_st_10_a_broken_stream_ends_by_an_error_and_no_stop(deltas: list[Delta]) -> None:
    renderer = make_renderer()
    frames = renderer.begin(None) + b"".join(map(renderer.delta, deltas))
    events = read_events(frames + renderer.error(facts(502, "upstream_error", "The engine died.")))

    assert events[-1]["error"] == {"type": "api_error", "message": "The engine died."}
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}


@pytest.mark.parametrize("status", [429, 502])
def test_st_11_an_upstreams_limit_inside_the_stream_is_told_as_one(status: int) -> None:
    renderer = make_renderer()
    (event,) = read_events(renderer.error(facts(status, "rate_limit_error", "slow down")))

    assert event["error"] == {"type": "rate_limit_error", "message": "slow down"}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, your prompt has 210000 tokens. Please reduce "
            "the length of the prompt.",
            "prompt is too long: 210000 tokens > 8192 maximum",
        ),
        (
            "This model's maximum context length is 8192 tokens. However, your prompt has at least 9000 tokens.",
            "prompt is too long: 9000 tokens > 8192 maximum",
        ),
        (
            "This model's maximum context length is 8192 tokens. However, your prompt has 8192 tokens.",
            "prompt is too long: 8192 tokens > 8191 maximum",
        ),
        (
            "This model's maximum context length is 4097 tokens. However, you requested 5000 tokens (4000 in the "
            "messages, 1000 in the completion).",
            "prompt is too long: 5000 tokens > 4097 maximum",
        ),
        (
            "request (1500 tokens) exceeds the available context size (1024 tokens), try increasing it",
            "prompt is too long: 1500 tokens > 1024 maximum",
        ),
        ("prompt is too long: 9 tokens > 8 maximum", "prompt is too long: 9 tokens > 8 maximum"),
        ("It doesn't fit.", "prompt is too long: It doesn't fit."),
    ],
)
def test_cx_01_an_overflow_has_the_words_that_make_a_client_compact(message: str, told: str) -> None:
    given = facts(400, message=message, code="context_length_exceeded")

    assert json.loads(error_body(given))["error"] == {"type": "invalid_request_error", "message": told}
    assert error_status(given) == 400


def test_cx_01_a_prompt_beyond_the_pool_is_an_overflow_that_says_what_to_do() -> None:
    message = (
        "This model's maximum context length is 640 tokens, all that its KV pool of 40 blocks (640 tokens) can hold. "
    )
    message += "However, your prompt has 700 tokens."

    told = json.loads(error_body(facts(400, message=message, code="kv_pool_too_small")))["error"]["message"]

    assert told.startswith("prompt is too long: 700 tokens > 640 maximum. This model's")


def test_cx_01_an_upstreams_overflow_without_a_code_is_known_by_its_words() -> None:
    given = facts(400, message="exceeds the available context size (1024 tokens)")
    assert json.loads(error_body(given))["error"]["message"].startswith("prompt is too long: ")


def test_an_error_of_another_field_is_no_overflow() -> None:
    given = facts(400, message="`context window` is unknown.", param="tools")
    assert json.loads(error_body(given))["error"]["message"] == "`context window` is unknown."
