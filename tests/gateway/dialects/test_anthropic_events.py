"""Streams and whole answers of the Anthropic dialect: blocks, their order, why an answer ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_support import (
    USAGE,
    USAGE_OBJECT,
    blocks_of,
    events_of,
    make_renderer,
    read_events,
    stop_of,
)
from generated_answers import call, text, thought

from gateway.core.types import ChoiceAnswer, FinishReason, Started, ToolCall
from gateway.dialects.anthropic_answer import MessagesContext


def whole(choice: ChoiceAnswer, chat_context: Any = None) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(make_renderer(chat_context).whole([choice], USAGE))
    return answer


def test_a_text_is_streamed_in_the_order_of_the_api() -> None:
    events = events_of([text("Hel"), text("lo")])

    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"] == {
        "id": "msg_" + "ab" * 16,
        "type": "message",
        "role": "assistant",
        "model": "smollm2",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 30,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    assert events[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert events[2] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}
    assert events[4] == {"type": "content_block_stop", "index": 0}
    assert events[5] == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": USAGE_OBJECT,
    }


def test_no_done_mark_ends_the_stream() -> None:
    assert b"[DONE]" not in make_renderer().finish(USAGE)


def test_an_upstream_that_says_nothing_of_its_start_counts_as_zero() -> None:
    (event,) = read_events(make_renderer().begin(None))
    assert event["message"]["usage"]["input_tokens"] == 0


def test_more_cached_tokens_than_prompt_never_give_a_negative_count() -> None:
    answer = json.loads(make_renderer().whole([_choice("x")], type(USAGE)(**_counts(3, 9))))
    assert answer["usage"]["input_tokens"] == 0


def _counts(prompt: int, cached: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": 1, "cached_tokens": cached}


def _choice(answer: str = "", **options: Any) -> ChoiceAnswer:
    return ChoiceAnswer(0, answer, reason=options.pop("reason", FinishReason.STOP), **options)


@pytest.mark.parametrize(
    ("deltas", "types"),
    [
        ([thought("a"), thought("b"), text("c"), text("d")], ["thinking", "text"]),
        ([text("a"), thought("b")], ["text", "thinking"]),
        ([thought("a"), text("b"), thought("c"), text("d")], ["thinking", "text", "thinking", "text"]),
        ([thought("a"), call(0, "f", "{}"), call(1, "g", "{}")], ["thinking", "tool_use", "tool_use"]),
        ([text(""), thought(""), thought("a"), text("")], ["thinking"]),
    ],
)
def test_an_01_each_block_has_one_type_and_the_next_number(deltas: list[Any], types: list[str]) -> None:
    assert [block["type"] for block in blocks_of(events_of(deltas))] == types


def test_a_block_of_thinking_ends_by_an_empty_signature() -> None:
    events = events_of([thought("why")])

    assert events[-4]["delta"] == {"type": "signature_delta", "signature": ""}
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_st_06_every_frame_is_an_object_of_its_events_type_pings_too() -> None:
    renderer = make_renderer()
    frames = renderer.heartbeat() + renderer.begin(Started(1, 1)) + renderer.delta(text("a")) + renderer.heartbeat()
    frames += renderer.delta(text("b")) + renderer.end(0, FinishReason.STOP) + renderer.finish(USAGE)

    events = read_events(frames)  # holds each frame to its type

    assert renderer.heartbeat() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert [event["type"] for event in events].count("ping") == 2
    assert blocks_of(events[1:])[0]["text"] == "ab"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_st_31_an_answer_of_reasoning_alone_is_a_block_of_thinking(reason: FinishReason) -> None:
    events = events_of([thought("never closed")], reason)
    answer = whole(_choice(reasoning="never closed", reason=reason))

    assert blocks_of(events) == answer["content"]
    assert answer["content"] == [{"type": "thinking", "thinking": "never closed", "signature": ""}]
    assert stop_of(events)[0] == answer["stop_reason"] == ("max_tokens" if reason == "length" else "end_turn")


def test_an_15_thinking_that_took_all_tokens_says_so_streamed_and_whole() -> None:
    events = events_of([thought("long")], FinishReason.LENGTH)
    answer = whole(_choice(reasoning="long", reason=FinishReason.LENGTH))

    assert stop_of(events) == ("max_tokens", None)
    assert (answer["stop_reason"], answer["usage"], answer["content"]) == (
        "max_tokens",
        USAGE_OBJECT,
        blocks_of(events),
    )


def test_an_answer_without_anything_has_one_empty_block_of_text() -> None:
    events, answer = events_of([]), whole(_choice())

    assert blocks_of(events) == answer["content"] == [{"type": "text", "text": ""}]
    assert stop_of(events)[0] == answer["stop_reason"] == "end_turn"


# ------------------------------------------------------------------------------------------------------------- calls


def test_tc_01_two_calls_are_two_blocks_and_a_stop_is_tool_use() -> None:
    events = events_of([call(0, "f", '{"x":1}'), call(1, "f", '{"x"'), call(1, arguments=":2}")], FinishReason.STOP)

    assert blocks_of(events) == [
        {"type": "tool_use", "id": "call_0", "name": "f", "input": '{"x":1}'},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": '{"x":2}'},
    ]
    assert stop_of(events) == ("tool_use", None)


def test_tc_01_a_cut_call_keeps_its_reason() -> None:
    assert stop_of(events_of([call(0, "f", '{"x')], FinishReason.LENGTH)) == ("max_tokens", None)


def test_tc_02_calls_without_an_id_get_one_each_streamed_and_whole() -> None:
    events = events_of([call(0, "f", "{}", call_id=""), call(1, "f", "{}", call_id="")])
    answer = whole(_choice(calls=[ToolCall("", "f", "{}"), ToolCall("", "f", "{}")]))

    ids = [block["id"] for block in blocks_of(events)]
    assert ids == [block["id"] for block in answer["content"]]
    assert len(set(ids)) == 2
    assert all(ids)


def test_tc_03_arguments_that_come_at_once_with_the_name_are_all_sent() -> None:
    (block,) = blocks_of(events_of([call(0, "f", '{"a":17,"b":25}')]))
    assert block["input"] == '{"a":17,"b":25}'


def test_tc_06_a_forced_call_ends_alike_streamed_and_whole() -> None:
    events = events_of([call(0, "f", "{}")], FinishReason.TOOL_CALLS)
    answer = whole(_choice(calls=[ToolCall("call_0", "f", "{}")], reason=FinishReason.TOOL_CALLS))

    assert stop_of(events)[0] == answer["stop_reason"] == "tool_use"
    assert [block["name"] for block in blocks_of(events)] == [block["name"] for block in answer["content"]] == ["f"]


def test_no_call_is_never_tool_use() -> None:
    assert stop_of(events_of([text("a")], FinishReason.TOOL_CALLS)) == ("end_turn", None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", {}),
        ("   ", {}),
        ("null", {}),
        ("{}", {}),
        (' {"a": 1}', {"a": 1}),
        ("[1]", {"_raw": "[1]"}),
        ('"text"', {"_raw": '"text"'}),
        ("not json", {"_raw": "not json"}),
    ],
)
def test_tc_09_arguments_that_are_no_object_become_one(arguments: str, told: dict[str, Any]) -> None:
    for parts in ([arguments], list(arguments)):
        deltas = [call(0, "f"), *(call(0, arguments=part) for part in parts)]
        (block,) = blocks_of(events_of(deltas))
        assert json.loads(block["input"] or "{}") == told
    assert whole(_choice(calls=[ToolCall("c", "f", arguments)]))["content"][0]["input"] == told


def test_tc_09_arguments_that_break_off_are_told_as_they_are() -> None:
    (block,) = blocks_of(events_of([call(0, "f", '{"a":1')], FinishReason.LENGTH))

    assert block["input"] == '{"a":1'
    assert whole(_choice(calls=[ToolCall("c", "f", '{"a":1')]))["content"][0]["input"] == {"_raw": '{"a":1'}


def test_tc_10_a_models_own_numbers_and_order_of_keys_are_kept() -> None:
    arguments = '{"z":1.0,"a":12345678901234567890123}'
    frames = make_renderer().whole([_choice(calls=[ToolCall("c", "f", arguments)])], USAGE)
    assert b'"input":' + arguments.encode() in frames


def test_tc_12_arguments_nested_too_deeply_are_told_as_text() -> None:
    arguments = '{"a":' * 100_000
    assert whole(_choice(calls=[ToolCall("c", "f", arguments)]))["content"][0]["input"] == {"_raw": arguments}


def test_text_after_a_complete_call_is_told_at_once() -> None:
    renderer = make_renderer()
    renderer.begin(None)
    renderer.delta(call(0, "f", '{"a":1}'))

    types = [event["type"] for event in read_events(renderer.delta(text("done")))]

    assert types == ["content_block_stop", "content_block_start", "content_block_delta"]


def test_text_in_the_middle_of_a_call_waits_for_its_end() -> None:
    blocks = blocks_of(events_of([call(0, "f", '{"a"'), text("x"), thought("y"), call(0, arguments=":1}"), text("z")]))

    assert [block["type"] for block in blocks] == ["tool_use", "text", "thinking", "text"]
    assert [blocks[0]["input"], blocks[1]["text"], blocks[2]["thinking"], blocks[3]["text"]] == [
        '{"a":1}',
        "x",
        "y",
        "z",
    ]


def test_a_changed_name_is_restored_streamed_and_whole() -> None:
    context = MessagesContext({"short": "mcp__server__the.name"})

    (block,) = blocks_of(events_of([call(0, "short", "{}")], chat_context=context))
    answer = whole(_choice(calls=[ToolCall("c", "short", "{}")]), context)

    assert block["name"] == answer["content"][0]["name"] == "mcp__server__the.name"


# ----------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP, 2, ("end_turn", None)),
        (FinishReason.STOP, "###", ("stop_sequence", "###")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
def test_the_reason_of_the_end(reason: FinishReason, stop_reason: Any, told: tuple[str, str | None]) -> None:
    events = events_of([text("a")], reason, stop_reason=stop_reason)
    answer = whole(_choice("a", reason=reason, stop_reason=stop_reason))

    assert stop_of(events) == (answer["stop_reason"], answer["stop_sequence"]) == told


def test_a_call_that_a_stop_sequence_cut_is_not_to_be_run() -> None:
    assert stop_of(events_of([call(0, "f", '{"a')], stop_reason="###")) == ("stop_sequence", "###")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_st_10_a_broken_answer_has_no_end_of_its_own(reason: FinishReason) -> None:
    with pytest.raises(AssertionError, match="ends by an error"):
        make_renderer().end(0, reason)


def test_whole_answer_lists_reasoning_then_text_then_calls() -> None:
    answer = whole(_choice("b", reasoning="a", calls=[ToolCall("c", "f", "{}")], reason=FinishReason.TOOL_CALLS))

    assert answer["content"] == [
        {"type": "thinking", "thinking": "a", "signature": ""},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    ]
    assert answer["usage"] == USAGE_OBJECT
