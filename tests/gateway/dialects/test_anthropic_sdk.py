"""Generated answers of the Anthropic dialect, read by Anthropic's own package: its types, its client, its helper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import types
from anthropic_support import USAGE, USAGE_OBJECT, blocks_of, make_renderer, read_events, stream
from generated_answers import ENDS, all_said, call, choice_of, deltas_of, some_segments, text, uncut
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.core.types import FinishReason
from gateway.dialects.anthropic_errors import error_body, error_status
from gateway.dialects.base import ErrorFacts

EVENT: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
PROPERTY = settings(derandomize=True, max_examples=80, deadline=None)
ASKED: dict[str, Any] = {"model": "smollm2", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

SEGMENTS = some_segments()


class Server:
    """Answers the package's client with what `reply` makes, without a socket."""

    def __init__(self) -> None:
        self.reply: Callable[[], httpx2.Response] = lambda: httpx2.Response(500)
        transport = httpx2.MockTransport(lambda request: self.reply())
        self.client = anthropic.Anthropic(
            api_key="k", base_url="http://gateway", max_retries=0, http_client=httpx2.Client(transport=transport)
        )

    def stream(self, frames: bytes) -> types.Message:
        """The message that the package's helper puts together."""
        headers = {"content-type": "text/event-stream"}
        self.reply = lambda: httpx2.Response(200, headers=headers, content=frames)
        with self.client.messages.stream(**ASKED) as events:
            for _ in events:
                pass
            message: types.Message = events.get_final_message()
        return message

    def whole(self, body: bytes) -> types.Message:
        self.reply = lambda: httpx2.Response(200, headers={"content-type": "application/json"}, content=body)
        message: types.Message = self.client.messages.create(**ASKED)
        return message


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    with made.client:
        yield made


def content_of(message: types.Message) -> list[dict[str, Any]]:
    blocks = [block.to_dict() for block in message.content]
    return [{key: block[key] for key in block if key != "parsed_output"} for block in blocks]


@PROPERTY
@given(SEGMENTS, ENDS)
def test_every_event_is_one_of_the_vendors_and_every_block_is_in_order(segments: Any, end: Any) -> None:
    events = read_events(stream(deltas_of(segments), *end))

    for event in events:
        EVENT.validate_python(event, strict=True)
    blocks_of(events)


@PROPERTY
@given(SEGMENTS, ENDS)
def test_texts_and_arguments_arrive_whole_wherever_they_are_cut(segments: Any, end: Any) -> None:
    blocks = blocks_of(read_events(stream(deltas_of(segments), *end)))

    assert blocks == blocks_of(read_events(stream(deltas_of(uncut(segments)), *end)))
    for kind, key in (("text", "text"), ("thought", "thinking")):
        assert "".join(block[key] for block in blocks if block["type"] == key) == all_said(segments, kind)
    assert sum(block["type"] == "tool_use" for block in blocks) == sum(kind == "call" for kind, *_ in segments)


@PROPERTY
@given(SEGMENTS, ENDS)
def test_the_packages_helper_puts_the_same_message_together(server: Server, segments: Any, end: Any) -> None:
    frames = stream(deltas_of(segments), *end)
    message = server.stream(frames)

    expected = [
        block | ({"input": json.loads(block["input"] or "{}")} if block["type"] == "tool_use" else {})
        for block in blocks_of(read_events(frames))
    ]
    assert content_of(message) == expected
    types.Message.model_validate_json(message.to_json())
    assert message.usage.to_dict() == USAGE_OBJECT


@PROPERTY
@given(SEGMENTS, ENDS)
def test_streamed_and_whole_say_the_same(server: Server, segments: Any, end: Any) -> None:
    streamed = server.stream(stream(deltas_of(segments), *end))
    body = make_renderer().whole([choice_of(deltas_of(segments), *end)], USAGE)
    whole = server.whole(body)

    types.Message.model_validate_json(body, strict=True)
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)
    assert (whole.usage.to_dict(), whole.id) == (streamed.usage.to_dict(), streamed.id)
    for kind in ("text", "thinking"):
        assert _joined(whole, kind) == _joined(streamed, kind)
    calls = [block for block in content_of(streamed) if block["type"] == "tool_use"]
    assert [block for block in content_of(whole) if block["type"] == "tool_use"] == calls


def _joined(message: types.Message, kind: str) -> str:
    return "".join(block[kind] for block in content_of(message) if block["type"] == kind)


@PROPERTY
@given(SEGMENTS, st.integers(0, 40))
def test_st_10_an_answer_that_breaks_anywhere_raises_in_the_client(server: Server, segments: Any, num: int) -> None:
    renderer = make_renderer()
    frames = renderer.heartbeat() + renderer.begin(None)
    frames += b"".join(map(renderer.delta, list(deltas_of(segments))[:num]))
    frames += renderer.error(ErrorFacts(502, "upstream_error", "The engine died.", code="upstream_gone"))

    with pytest.raises(anthropic.APIStatusError, match="The engine died"):
        server.stream(frames)


def test_broken_arguments_are_left_to_the_packages_own_error(server: Server) -> None:
    with pytest.raises(ValueError, match="Unable to parse tool parameter JSON"):
        server.stream(stream([call(0, "f", '{"a" 1}')]))


def test_a_call_that_the_token_limit_cut_is_read_as_far_as_it_goes(server: Server) -> None:
    message = server.stream(stream([call(0, "f", '{"a":1,"b":"x')], FinishReason.LENGTH))

    assert message.stop_reason == "max_tokens"
    assert content_of(message)[0]["input"] == {"a": 1}


def test_pings_before_and_between_events_are_skipped(server: Server) -> None:
    renderer = make_renderer()
    frames = renderer.heartbeat() + renderer.begin(None) + renderer.heartbeat() + renderer.delta(text("a"))
    frames += renderer.heartbeat() + renderer.end(0, FinishReason.STOP) + renderer.finish(USAGE)

    assert content_of(server.stream(frames)) == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        (ErrorFacts(400, "invalid_request_error", "m"), anthropic.BadRequestError),
        (ErrorFacts(401, "authentication_error", "m"), anthropic.AuthenticationError),
        (ErrorFacts(403, "permission_error", "m"), anthropic.PermissionDeniedError),
        (ErrorFacts(404, "not_found_error", "m"), anthropic.NotFoundError),
        (ErrorFacts(429, "rate_limit_error", "m"), anthropic.RateLimitError),
        (ErrorFacts(503, "service_unavailable_error", "m"), anthropic.InternalServerError),
    ],
)
def test_an_error_is_raised_as_its_class(server: Server, facts: ErrorFacts, error: type[Exception]) -> None:
    headers = {"content-type": "application/json"}
    server.reply = lambda: httpx2.Response(error_status(facts), headers=headers, content=error_body(facts))

    with pytest.raises(error, match="m"):
        server.client.messages.create(**ASKED)
