"""Answers of OpenAI-compatible servers as events: lenient where servers differ, never a falsified answer."""

from __future__ import annotations

import json

import pytest

from backends.protocol.messages import Usage
from gateway.core.errors import UpstreamError, UpstreamGone
from gateway.core.sse_scan import Frame
from gateway.core.types import (
    ChoiceFinished,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from gateway.dialects.chat_stream import ChatDecoder

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}


def frame(data, event=""):
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Frame(b"", raw, event)


def delta(index=0, reason=None, **fields):
    return {"choices": [{"index": index, "delta": fields, "finish_reason": reason}]}


def stream(*chunks):
    decoder = ChatDecoder("r" * 32)
    events = [event for chunk in chunks for event in decoder.frame(frame(chunk))]
    return events + decoder.finish()


def whole(message, reason="stop", **more):
    body = {"choices": [{"index": 0, "message": message, "finish_reason": reason}], **more}
    return ChatDecoder("r" * 32).whole(json.dumps(body).encode())


def said(events):
    """What the events say, joined by kind."""
    found = {"text": "", "reasoning": "", "calls": []}
    for event in events:
        match event:
            case TextDelta():
                found["text"] += event.text
            case ReasoningDelta():
                found["reasoning"] += event.text
            case ToolCallDelta():
                if event.name:
                    found["calls"].append([event.name, ""])
                found["calls"][-1][1] += event.arguments
            case _:
                found["reason"] = event.reason
    return found


def test_text_usage_and_reason_of_a_stream():
    events = stream(
        delta(role="assistant", content=""),
        delta(content="Hel"),
        delta(content="lo"),
        delta(reason="stop"),
        {"choices": [], "usage": USAGE},
        b"[DONE]",
    )

    assert [event.text for event in events[:-1]] == ["Hel", "lo"]
    assert isinstance(events[-1], Finished)
    assert events[-1].usage == Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=5)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_st_31_reasoning_is_told_apart_under_both_names(field):
    assert said(stream(delta(**{field: "hm"}), delta(content="so"), delta(reason="stop")))["reasoning"] == "hm"
    assert said(whole({"content": "so", field: "hm"}))["reasoning"] == "hm"


def test_st_31_an_answer_of_reasoning_alone_keeps_its_length_reason():
    events = said(stream(delta(reasoning_content="hm"), delta(reason="length")))
    assert (events["text"], events["reason"]) == ("", FinishReason.LENGTH)


def test_both_names_of_reasoning_at_once_count_once():
    assert said(stream(delta(reasoning="hm", reasoning_content="hm"), delta(reason="stop")))["reasoning"] == "hm"


def test_content_in_parts_is_text_and_thought():
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "so"}]
    found = said(whole({"content": parts}))
    assert (found["text"], found["reasoning"]) == ("so", "hm")


CALLS = [{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    ("reason", "is_said"), [("stop", "tool_calls"), ("tool_calls", "tool_calls"), ("length", "length")]
)
def test_tc_01_calls_end_as_calls_unless_they_were_cut(reason, is_said):
    streamed, at_once = stream(delta(tool_calls=CALLS), delta(reason=reason)), whole({"tool_calls": CALLS}, reason)
    assert said(streamed) == said(at_once)
    assert (said(streamed)["calls"], said(streamed)["reason"]) == ([["f", '{"x":1}']], FinishReason(is_said))


def test_tool_calls_as_the_reason_without_any_call_is_a_stop():
    assert said(stream(delta(content="x"), delta(reason="tool_calls")))["reason"] is FinishReason.STOP


def test_tc_03_all_arguments_in_one_piece_are_not_lost():
    one = [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"a":17,"b":25}'}}]
    assert said(stream(delta(tool_calls=one, reason="tool_calls")))["calls"] == [["f", '{"a":17,"b":25}']]


def test_the_older_function_call_is_a_call():
    found = said(stream(delta(function_call={"name": "f", "arguments": "{}"}), delta(reason="function_call")))
    assert (found["calls"], found["reason"]) == ([["f", "{}"]], FinishReason.TOOL_CALLS)


def test_several_choices_end_one_by_one_and_the_last_ends_the_answer():
    events = stream(delta(1, content="b"), delta(0, content="a"), delta(0, "stop"), delta(1, "length"))
    assert [event.index for event in events[:2]] == [1, 0]
    assert events[2:3] == [ChoiceFinished(0, FinishReason.STOP)]
    assert isinstance(events[3], Finished)
    assert (events[3].index, events[3].reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize("chunks", [[], [delta(content="a")], [delta(0, "stop"), delta(1, content="b")], [b"[DONE]"]])
def test_st_10_an_end_without_a_reason_is_a_failure(chunks):
    with pytest.raises(UpstreamGone):
        stream(*chunks)


@pytest.mark.parametrize("data", [b'{"cho', b"plain", b"[1]", b'"x"'])
def test_st_11_a_frame_that_can_not_be_read_is_a_failure(data):
    with pytest.raises(UpstreamGone):
        stream(delta(content="a"), data)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({"message": "rate limit", "type": "rate_limit_error", "code": 429}, 429, "upstream_error"),
        ({"message": "rate limit", "code": "429"}, 429, "upstream_error"),
        ({"message": "too long", "code": "context_length_exceeded"}, 502, "context_length_exceeded"),
        ("just words", 502, "upstream_error"),
    ],
)
def test_st_11_an_error_inside_the_stream_is_raised_in_its_own_words(error, status, code):
    with pytest.raises(UpstreamError) as caught:
        stream(delta(content="a"), {"error": error})
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.message == (error if isinstance(error, str) else error["message"])


def test_an_error_event_is_an_error_whatever_its_data_is():
    with pytest.raises(UpstreamError, match="gone"):
        ChatDecoder("r").frame(frame({"message": "gone"}, "error"))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_generation_that_was_given_up_is_no_stop(reason):
    assert said(stream(delta(content="a"), delta(reason=reason)))["reason"] is FinishReason(reason)


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": None},
        {"choices": [None, 3]},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": 3}}]},
        {"choices": [{"index": -1, "delta": {"tool_calls": "x"}}]},
        {"usage": "x"},
        {"usage": {"prompt_tokens": "9"}},
    ],
)
def test_odd_chunks_are_nothing(chunk):
    assert [
        event for event in stream(chunk, delta(content="a"), delta(reason="stop")) if isinstance(event, TextDelta)
    ] == [TextDelta("a", 0, 0)]


def test_comments_and_empty_data_are_nothing():
    assert ChatDecoder("r").frame(Frame(b":\n\n", None)) == ChatDecoder("r").frame(frame(b" ")) == []
