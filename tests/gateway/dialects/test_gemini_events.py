"""Events of an answer as Gemini's stream, its array and its whole answer: golden, and as its JS client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gemini_support import (
    THINKING,
    USAGE,
    USAGE_METADATA,
    JsError,
    chunks_of,
    cut,
    make_array_renderer,
    make_renderer,
    parts_of,
    play,
    read_js,
    stream,
)
from generated_answers import call, choice_of, text, thought

from gateway.core.types import FinishReason
from gateway.dialects.base import ErrorFacts
from gateway.dialects.gemini import ARRAY_DIALECT, DIALECT
from gateway.dialects.gemini_answer import GenerateContext

DIED = ErrorFacts(502, "upstream_error", "The engine died.", code="upstream_gone")
HEAD = {"modelVersion": "smollm2", "responseId": "ab" * 16}


def candidate(*parts: dict[str, Any], **end: Any) -> dict[str, Any]:
    return {"content": {"parts": list(parts), "role": "model"}, **end, "index": 0}


def test_a_stream_is_frames_of_data_and_the_last_says_reason_and_usage() -> None:
    frames = stream([text("po"), text("ng")])

    assert frames.count(b"data: ") == frames.count(b"\n\n") == 3
    assert read_js([frames]) == [
        {"candidates": [candidate({"text": "po"})], **HEAD},
        {"candidates": [candidate({"text": "ng"})], **HEAD},
        {"candidates": [candidate({"text": ""}, finishReason="STOP")], **HEAD, "usageMetadata": USAGE_METADATA},
    ]


def test_a_whole_answer_has_the_same_shape() -> None:
    body = make_renderer().whole([choice_of([text("pong")], FinishReason.LENGTH)], USAGE)

    assert json.loads(body) == {
        "candidates": [candidate({"text": "pong"}, finishReason="MAX_TOKENS")],
        **HEAD,
        "usageMetadata": USAGE_METADATA,
    }


def test_tc_calls_come_whole_with_their_arguments_as_an_object() -> None:
    deltas = [
        text("a"),
        call(0, "read", '{"pa'),
        call(0, arguments='th": "x"}'),
        call(1, "list"),
        call(2, "f", "[1]"),
    ]
    chunks = chunks_of(deltas, FinishReason.TOOL_CALLS)

    assert parts_of(chunks) == [
        {"text": "a"},
        {"functionCall": {"id": "call_0", "name": "read", "args": {"path": "x"}}},
        {"functionCall": {"id": "call_1", "name": "list", "args": {}}},
        {"functionCall": {"id": "call_2", "name": "f", "args": {"_raw": "[1]"}}},
    ]
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


def test_text_in_the_middle_of_a_call_waits_for_nothing_and_loses_nothing() -> None:
    parts = parts_of(chunks_of([call(0, "f", '{"a":'), text("x"), call(0, arguments="1}"), text("y")]))
    assert parts == [{"text": "xy"}, {"functionCall": {"id": "call_0", "name": "f", "args": {"a": 1}}}]


def test_an_upstream_that_leaves_out_ids_gets_calls_that_can_be_told_apart() -> None:
    parts = parts_of(chunks_of([call(0, "f", "{}", ""), call(1, "f", "{}", "")]))
    ids = [part["functionCall"]["id"] for part in parts]
    assert ids == [f"call_{'ab' * 16}_0_0", f"call_{'ab' * 16}_0_1"]


def test_names_that_were_changed_for_an_upstream_are_restored() -> None:
    context = GenerateContext({"a_b_1": "a.b"})
    parts = parts_of(chunks_of([call(0, "a_b_1", "{}")], chat_context=context))
    assert parts[0]["functionCall"]["name"] == "a.b"


@pytest.mark.parametrize(
    ("end", "reason", "by"),
    [
        ((FinishReason.LENGTH, None), "MAX_TOKENS", "the token limit"),
        ((FinishReason.STOP, "##"), "MALFORMED_FUNCTION_CALL", "a stop sequence"),
    ],
)
def test_a_call_that_was_cut_is_left_out_and_it_is_said(end: Any, reason: str, by: str) -> None:
    deltas = [call(0, "f", "{}"), call(1, "g", '{"a": "x')]
    whole = json.loads(make_renderer().whole([choice_of(deltas, *end)], USAGE))

    for chunks in (chunks_of(deltas, *end), [whole]):
        assert [part["functionCall"]["name"] for part in parts_of(chunks)] == ["f"]
        last = chunks[-1]["candidates"][0]
        assert (last["finishReason"], last["finishMessage"]) == (
            reason,
            f"A call of 'g' was cut by {by} and is left out.",
        )


def test_a_call_that_the_limit_found_complete_is_told() -> None:
    chunks = chunks_of([call(0, "f", '{"a": 1}')], FinishReason.LENGTH)
    assert parts_of(chunks)[0]["functionCall"]["args"] == {"a": 1}
    assert chunks[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_thoughts_are_told_only_where_they_were_asked_for_and_counted_always() -> None:
    deltas = [thought("why", 3), text("so")]
    counted = USAGE_METADATA | {"candidatesTokenCount": 4, "thoughtsTokenCount": 3}
    asked, unasked = chunks_of(deltas, chat_context=THINKING), chunks_of(deltas)

    assert parts_of(asked) == [{"text": "why", "thought": True}, {"text": "so"}]
    assert parts_of(unasked) == [{"text": "so"}]
    assert asked[-1]["usageMetadata"] == unasked[-1]["usageMetadata"] == counted
    for context, parts in ((THINKING, parts_of(asked)), (None, parts_of(unasked))):
        whole = json.loads(make_renderer(context).whole([choice_of(deltas, FinishReason.STOP)], USAGE))
        assert (parts_of([whole]), whole["usageMetadata"]) == (parts, counted)


def test_an_answer_of_nothing_still_has_a_part() -> None:
    assert chunks_of([])[-1]["candidates"] == [candidate({"text": ""}, finishReason="STOP")]
    whole = json.loads(make_renderer().whole([choice_of([], FinishReason.STOP)], USAGE))
    assert whole["candidates"] == [candidate({"text": ""}, finishReason="STOP")]


def test_candidates_are_told_apart_and_all_end_in_the_last_frame() -> None:
    renderer = make_renderer()
    frames = renderer.begin(None) + renderer.start(0) + renderer.delta(text("a")) + renderer.start(1)
    frames += renderer.delta(text("b", 1)) + renderer.end(1, FinishReason.LENGTH) + renderer.delta(text("c"))
    chunks = read_js([frames + renderer.end(0, FinishReason.STOP) + renderer.finish(USAGE)])

    assert (parts_of(chunks, 0), parts_of(chunks, 1)) == ([{"text": "ac"}], [{"text": "b"}])
    ends = {said["index"]: said["finishReason"] for said in chunks[-1]["candidates"]}
    assert ends == {0: "STOP", 1: "MAX_TOKENS"}


# ---------------------------------------------------------------------------------------------- as its client reads it


def test_line_separators_of_unicode_do_not_stop_the_clients_pattern() -> None:
    said = "a\u2028b\u2029c\u200bd – é"
    frames = stream([text(said), call(0, "f", json.dumps({"x": said}, ensure_ascii=False))])

    assert "\u2028" not in frames.decode()
    assert parts_of(read_js([frames])) == [
        {"text": said},
        {"functionCall": {"id": "call_0", "name": "f", "args": {"x": said}}},
    ]


def test_heartbeats_before_and_between_frames_are_nothing_to_the_client() -> None:
    renderer = make_renderer()
    beat = renderer.heartbeat()
    frames = beat + beat + renderer.begin(None) + renderer.delta(text("a")) + beat
    frames += renderer.delta(text("b")) + renderer.end(0, FinishReason.STOP) + beat + renderer.finish(USAGE) + beat

    assert beat
    assert parts_of(read_js([frames])) == [{"text": "ab"}]


def test_st_01_no_end_mark_no_event_name_and_no_comment_stand_in_the_stream() -> None:
    lines = stream([thought("t"), text("a"), call(0, "f", "{}")], chat_context=THINKING).split(b"\n")
    assert all(line.startswith(b"data: {") for line in lines if line)
    assert not DIALECT.takes_comments


@pytest.mark.parametrize("place", range(0, 600, 7))
def test_a_stream_cut_anywhere_by_the_network_is_read_whole(place: int) -> None:
    frames = stream([text("é\u2028"), call(0, "f", '{"a": "ü"}')])
    assert read_js(cut(frames, [place])) == read_js([frames])


def test_st_10_an_error_alone_in_a_read_is_thrown_with_its_status_and_message() -> None:
    renderer = make_renderer()
    with pytest.raises(JsError, match=r"UNAVAILABLE.*The engine died") as caught:
        read_js([renderer.delta(text("a")), renderer.error(DIED)])
    assert caught.value.status == 502


def test_st_10_an_error_read_together_with_frames_never_looks_like_an_end() -> None:
    renderer = make_renderer()
    with pytest.raises(JsError, match="Incomplete JSON"):
        read_js([renderer.delta(text("a")) + renderer.error(DIED)])


# ---------------------------------------------------------------------------------------------------------- the array


def test_without_sse_the_stream_is_one_array_with_blanks_between() -> None:
    deltas = [text("a\u2028"), call(0, "f", "{}")]
    renderer = make_array_renderer()
    array = renderer.heartbeat() + play(renderer, deltas)

    assert json.loads(array) == chunks_of(deltas)
    assert ARRAY_DIALECT.stream_type == "application/json"
    assert (ARRAY_DIALECT.name, ARRAY_DIALECT.parse) == (DIALECT.name, DIALECT.parse)


def test_heartbeats_leave_the_array_an_array() -> None:
    renderer = make_array_renderer()
    beat = renderer.heartbeat()
    data = beat + renderer.begin(None) + renderer.delta(text("a")) + beat + renderer.delta(text("b"))
    assert parts_of(json.loads(data + renderer.end(0, FinishReason.STOP) + beat + renderer.finish(USAGE) + beat)) == [
        {"text": "ab"}
    ]


@pytest.mark.parametrize("begun", [True, False])
def test_st_10_an_error_is_the_arrays_last_element(begun: bool) -> None:
    renderer = make_array_renderer()
    data = renderer.heartbeat() + (renderer.begin(None) + renderer.delta(text("a")) if begun else b"")
    *said, last = json.loads(data + renderer.error(DIED))

    assert len(said) == begun
    assert (last["error"]["code"], last["error"]["status"]) == (502, "UNAVAILABLE")
