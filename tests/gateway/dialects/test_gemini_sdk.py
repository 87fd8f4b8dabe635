"""Generated answers of the Gemini dialect, read by Google's own package: its types and its client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import pytest
from gemini_support import (
    THINKING,
    USAGE,
    Chunk,
    JsError,
    cut,
    make_array_renderer,
    make_renderer,
    parts_of,
    play,
    read_js,
    stream,
)
from generated_answers import ENDS, all_said, call, choice_of, deltas_of, some_segments, text
from google import genai
from google.genai import errors, types
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.types import FinishReason
from gateway.dialects.base import ErrorFacts
from gateway.dialects.gemini_errors import error_body

PROPERTY = settings(derandomize=True, max_examples=80, deadline=None)
DIED = ErrorFacts(502, "upstream_error", "The engine died.", code="upstream_gone")

SEGMENTS = some_segments('{"a')
PLACES = st.lists(st.integers(0, 10_000), max_size=6)


class Server:
    """Answers the package's client with what `reply` makes, without a socket."""

    def __init__(self) -> None:
        self.reply: Callable[[httpx2.Request], httpx2.Response] = lambda request: httpx2.Response(500)
        self.asked: list[httpx2.Request] = []
        options = types.HttpOptions(
            base_url="http://gateway", client_args={"transport": httpx2.MockTransport(self._answer)}
        )
        self.client = genai.Client(api_key="local", vertexai=False, http_options=options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        return self.reply(request)

    def stream(self, frames: bytes) -> list[types.GenerateContentResponse]:
        headers = {"content-type": "text/event-stream"}
        self.reply = lambda _: httpx2.Response(200, headers=headers, content=frames)
        return list(self.client.models.generate_content_stream(model="smollm2", contents="hi"))

    def whole(self, body: bytes, status: int = 200) -> types.GenerateContentResponse:
        headers = {"content-type": "application/json"}
        self.reply = lambda _: httpx2.Response(status, headers=headers, content=body)
        return self.client.models.generate_content(model="smollm2", contents="hi")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.client.close()


def as_wire(responses: Sequence[types.GenerateContentResponse]) -> list[Chunk]:
    return [json.loads(said.model_dump_json(by_alias=True, exclude_none=True)) for said in responses]


def calls_and_texts(chunks: Sequence[Chunk]) -> list[Any]:
    """The calls in order, then everything said, then everything thought."""
    parts = parts_of(chunks)
    calls: list[Any] = [part["functionCall"] for part in parts if "functionCall" in part]
    for kind in (None, True):
        calls.append("".join(part["text"] for part in parts if "text" in part and part.get("thought") == kind))
    return calls


@PROPERTY
@given(SEGMENTS, ENDS, PLACES)
def test_every_chunk_is_one_of_the_vendors_wherever_it_is_cut(segments: Any, end: Any, places: Any) -> None:
    chunks = read_js(cut(stream(deltas_of(segments), *end, chat_context=THINKING), places))

    for chunk in chunks:
        types.GenerateContentResponse.model_validate(chunk)  # which forbids fields that it doesn't know
    assert [("finishReason" in said, "usageMetadata" in said) for said in chunks[:-1]] == [
        (False, False) for _ in chunks[:-1]
    ]
    assert chunks[-1]["candidates"][0]["finishReason"]


@PROPERTY
@given(SEGMENTS, ENDS)
def test_streamed_whole_and_array_say_the_same(segments: Any, end: Any) -> None:
    chunks = read_js([stream(deltas_of(segments), *end, chat_context=THINKING)])
    body = make_renderer(THINKING).whole([choice_of(deltas_of(segments), *end)], USAGE)
    array = play(make_array_renderer(THINKING), deltas_of(segments), *end)

    whole = json.loads(body)
    types.GenerateContentResponse.model_validate_json(body)
    assert calls_and_texts([whole]) == calls_and_texts(chunks)
    assert whole["usageMetadata"] == chunks[-1]["usageMetadata"]
    ends = [
        {key: value for key, value in said["candidates"][0].items() if key != "content"} for said in (whole, chunks[-1])
    ]
    assert ends[0] == ends[1]
    assert json.loads(array) == chunks


@PROPERTY
@given(SEGMENTS, ENDS)
def test_nothing_that_was_said_is_lost(segments: Any, end: Any) -> None:
    *calls, said, thoughts = calls_and_texts(read_js([stream(deltas_of(segments), *end, chat_context=THINKING)]))

    assert said == all_said(segments, "text")
    assert thoughts == all_said(segments, "thought")
    num_calls = sum(kind == "call" for kind, *_ in segments)
    assert len(calls) in (
        (num_calls,) if end[0] is not FinishReason.LENGTH and not end[1] else (num_calls, num_calls - 1)
    )


@PROPERTY
@given(SEGMENTS, ENDS)
def test_the_packages_client_reads_what_was_sent(server: Server, segments: Any, end: Any) -> None:
    frames = stream(deltas_of(segments), *end, chat_context=THINKING)

    for response in (frames, b"\n" + frames.replace(b"\n\n", b"\n\n\n")):  # heartbeats between all frames
        read = as_wire(server.stream(response))
        assert calls_and_texts(read) == calls_and_texts(read_js([frames]))
        assert read[-1]["usageMetadata"] == read_js([frames])[-1]["usageMetadata"]


@PROPERTY
@given(SEGMENTS, st.integers(0, 40), PLACES)
def test_st_10_an_answer_that_breaks_anywhere_raises_in_both_clients(
    server: Server, segments: Any, num: int, places: Any
) -> None:
    renderer = make_renderer(THINKING)
    frames = renderer.heartbeat() + renderer.begin(None)
    frames += b"".join(map(renderer.delta, list(deltas_of(segments))[:num])) + renderer.error(DIED)

    with pytest.raises(errors.ServerError, match="The engine died"):
        server.stream(frames)
    with pytest.raises(JsError):
        read_js(cut(frames, places))


def test_a_whole_answer_is_read_with_its_text_calls_and_usage(server: Server) -> None:
    deltas = [text("so"), call(0, "f", '{"a": 1}')]
    said = server.whole(make_renderer().whole([choice_of(deltas, FinishReason.TOOL_CALLS)], USAGE))

    assert said.candidates is not None
    assert said.candidates[0].finish_reason is types.FinishReason.STOP
    assert [(part.id, part.name, part.args) for part in said.function_calls or []] == [("call_0", "f", {"a": 1})]
    assert said.usage_metadata is not None
    assert said.usage_metadata.cached_content_token_count == 10
    assert (said.model_version, said.response_id) == ("smollm2", "ab" * 16)


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        (ErrorFacts(400, "invalid_request_error", "m", param="contents"), errors.ClientError),
        (ErrorFacts(401, "authentication_error", "m", code="invalid_api_key"), errors.ClientError),
        (ErrorFacts(404, "invalid_request_error", "m", code="model_not_found"), errors.ClientError),
        (ErrorFacts(503, "service_unavailable_error", "m", retry_after_seconds=2.0), errors.ServerError),
    ],
)
def test_an_error_is_raised_as_its_class(server: Server, facts: ErrorFacts, error: type[errors.APIError]) -> None:
    with pytest.raises(error, match="m") as caught:
        server.whole(error_body(facts), facts.status)
    assert (caught.value.code, caught.value.message) == (facts.status, "m")


def test_the_packages_requests_go_where_the_gateway_takes_them(server: Server) -> None:
    body = make_renderer().whole([choice_of([text("x")], FinishReason.STOP)], USAGE)
    server.whole(body)

    asked = server.asked[-1]
    assert asked.url.path in ("/v1/models/smollm2:generateContent", "/v1beta/models/smollm2:generateContent")
    assert asked.headers["x-goog-api-key"] == "local"
