"""Streams and whole answers of the Responses dialect, held to the types of the vendor's own client and read by it."""

from __future__ import annotations

import json

import pytest
from generated_answers import text, thought
from openai import APIError
from responses_support import (
    REQUEST_ID,
    USAGE,
    call,
    check,
    make_renderer,
    names,
    read_events,
    sdk,
    stream,
    whole,
)

from backends.protocol.messages import TokenLogprob
from gateway.core.types import FinishReason, TextDelta
from gateway.dialects.base import AnswerContext, ErrorFacts
from gateway.dialects.openai_responses import DIALECT

PATCH = '*** Begin Patch\n+\tä \U0001f600 "q" \\ \n*** End Patch'
GONE = ErrorFacts(502, "upstream_error", "The upstream died.", None, "upstream_gone")


def test_rs_04_a_text_is_streamed_in_the_order_of_the_api():
    events = read_events(stream([text("Hel"), text("lo")]))

    assert names(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[6]["text"] == "Hello"
    assert events[8]["item"] == {
        "id": f"msg_{REQUEST_ID}_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    check(events)


def test_the_end_has_everything_that_clients_read():
    response = read_events(stream([text("a")]))[-1]["response"]

    assert response["id"] == f"resp_{REQUEST_ID}"
    assert (response["status"], response["model"], response["created_at"]) == ("completed", "smollm2", 1_700_000_000)
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 39,
    }
    assert response["tool_choice"] == "auto"
    assert response["parallel_tool_calls"] is True
    assert [tool["type"] for tool in response["tools"]] == ["function", "custom", "namespace"]


def test_there_is_no_done_frame():
    assert b"[DONE]" not in stream([text("a")])


def test_rs_02_two_calls_have_all_their_events():
    events = read_events(stream(call(0, "shell", '{"cmd":', '"ls"}') + call(1, "crm__find"), FinishReason.TOOL_CALLS))

    assert names(events)[2:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    first, second = check(events).items.values()
    assert (first["name"], first["call_id"], first["arguments"]) == ("shell", "call_0", '{"cmd":"ls"}')
    assert "namespace" not in first
    assert (second["name"], second["namespace"], second["arguments"]) == ("find", "crm", "{}")
    assert events[-1]["response"]["output"] == [first, second]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_custom_tool_is_called_with_plain_text(size):
    arguments = json.dumps({"input": PATCH})
    parts = [arguments[start : start + size] for start in range(0, len(arguments), size)]

    events = read_events(stream(call(0, "apply_patch", *parts), FinishReason.TOOL_CALLS))

    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    (item,) = check(events).items.values()
    assert item["id"] == f"ctc_{REQUEST_ID}_0"
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", PATCH)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input":"a"}', "a"),
        ('{ "input" : "a" }', "a"),
        ('{"patch":"a"}', "a"),
        ('{"a":"1","b":"2"}', '{"a":"1","b":"2"}'),
        ('"a"', "a"),
        ("just text", "just text"),
        ("", ""),
        ("{}", "{}"),
        ('{"input":""}', ""),
        ('{"input":5}', '{"input":5}'),
        ('{"input":"raw\nline"}', "raw\nline"),
        ('{"input":"\\ud83d"}', "\ufffd"),
        ('{"input":"\\ude00x"}', "\ufffdx"),
    ],
)
def test_tc_09_a_custom_tools_input_is_found_in_whatever_the_model_wrote(arguments, expected):
    deltas = call(0, "apply_patch", arguments)

    (item,) = check(read_events(stream(deltas))).items.values()

    assert item["input"] == expected
    assert whole(deltas)["output"] == [item]


def test_rs_09_reasoning_is_an_item_of_its_own_before_the_text():
    events = read_events(stream([thought("so"), thought(" it is"), text("Yes")]))

    assert names(events)[2:8] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done",
    ]  # fmt: skip
    reasoning, message = check(events).items.values()
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert (reasoning["id"], message["id"]) == (f"rs_{REQUEST_ID}_0", f"msg_{REQUEST_ID}_1")
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_st_31_reasoning_alone_is_no_empty_answer():
    for reason, status in ((FinishReason.LENGTH, "incomplete"), (FinishReason.STOP, "completed")):
        response = read_events(stream([thought("hm")], reason))[-1]["response"]
        assert [item["type"] for item in response["output"]] == ["reasoning"]
        assert response["status"] == response["output"][0]["status"] == status
        assert whole([thought("hm")], reason)["output"] == response["output"]


def test_an_answer_of_nothing_is_an_empty_message():
    events = read_events(stream([]))

    (item,) = check(events).items.values()
    assert item["content"][0]["text"] == ""
    assert whole([])["output"] == [item]


@pytest.mark.parametrize("deltas", [[text("a")], [], call(0, "shell", "{}"), [thought("a")]])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
def test_rs_01_every_end_is_one_terminal_event(deltas, reason):
    events = read_events(stream(deltas, reason))

    ended = [name for name in names(events) if name in ("completed", "incomplete", "failed")]
    assert ended == ["incomplete" if reason is FinishReason.LENGTH else "completed"]
    assert names(events)[-1] == ended[0]


def test_a_token_limit_is_told_as_such():
    response = read_events(stream([text("a")], FinishReason.LENGTH))[-1]["response"]

    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("name", "arguments", "key", "value"),
    [("shell", '{"cmd":"rm -rf /tmp/x', "arguments", '{"cmd":"rm -rf /tmp/x'),
     ("apply_patch", '{"input":"rm -rf /tmp/x', "input", "rm -rf /tmp/x")],
)  # fmt: skip
def test_a_call_that_was_cut_off_is_never_done(name, arguments, key, value):
    deltas = [*call(0, "shell", "{}"), *call(1, name, arguments)]

    events = read_events(stream(deltas, FinishReason.LENGTH))

    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["call_id"] for item in done] == ["call_0"]
    cut = events[-1]["response"]["output"][1]
    assert (cut[key], cut["status"]) == (value, "incomplete")
    assert whole(deltas, FinishReason.LENGTH)["output"] == events[-1]["response"]["output"]


def test_logprobs_go_with_their_text():
    logprobs = [TokenLogprob("a", b"a", -0.5, 0, [TokenLogprob("b", b"b", -1.5)])]

    events = read_events(stream([TextDelta("a", 1, 0, logprobs), TextDelta("", 0, 0, [])]))

    expected = [{"token": "a", "logprob": -0.5, "bytes": [97],
                 "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}]}]  # fmt: skip
    assert events[4]["logprobs"] == expected
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected


def test_heartbeats_are_data_events_and_begin_the_stream():
    renderer = make_renderer()

    early = renderer.heartbeat() + renderer.heartbeat()
    frames = early + renderer.begin(None) + renderer.delta(text("a")) + renderer.heartbeat()
    frames += renderer.end(0, FinishReason.STOP) + renderer.finish(USAGE)

    events = read_events(frames)
    assert names(events)[:4] == ["created", "in_progress", "in_progress", "output_item.added"]
    assert names(events).count("in_progress") == 3
    assert names(events).count("created") == 1
    check(events)


@pytest.mark.parametrize("num_steps", range(5))
def test_rs_05_a_stream_that_breaks_fails_by_its_own_event(num_steps):
    renderer = make_renderer()
    deltas = [text("a"), *call(0, "shell", "{")]
    frames = renderer.begin(None) if num_steps else b""
    frames += b"".join(renderer.delta(delta) for delta in deltas[: max(0, num_steps - 1)])

    events = read_events(frames + renderer.error(GONE))

    assert names(events)[-2:] == ["error", "failed"]
    response = events[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "The upstream died."}
    assert (response["status"], response["id"]) == ("failed", f"resp_{REQUEST_ID}")
    assert renderer.conversation() is None


def test_st_10_the_sdk_raises_on_a_broken_stream():
    renderer = make_renderer()
    frames = renderer.begin(None) + renderer.delta(text("a")) + renderer.error(GONE)

    with pytest.raises(APIError, match="The upstream died"):
        list(sdk(frames).responses.create(model="m", input="x", stream=True))
    with (
        pytest.raises(APIError, match="The upstream died"),
        sdk(frames).responses.stream(model="m", input="x") as events,
    ):
        events.get_final_response()


@pytest.mark.parametrize(
    ("facts", "code", "message"),
    [
        (ErrorFacts(429, "rate_limit_error", "Full.", None, "queue_full", retry_after_seconds=5),
         "rate_limit_exceeded", "Full. Please try again in 5s."),
        (ErrorFacts(429, "rate_limit_error", "Full."), "rate_limit_exceeded", "Full. Please try again in 1s."),
        (ErrorFacts(429, "rate_limit_error", "Try again in 3s."), "rate_limit_exceeded", "Try again in 3s."),
        (ErrorFacts(400, "invalid_request_error", "Too long.", None, "context_length_exceeded"),
         "context_length_exceeded", "Too long."),
        (ErrorFacts(429, "rate_limit_error", "Pay.", None, "insufficient_quota"), "insufficient_quota", "Pay."),
        (ErrorFacts(400, "invalid_request_error", "Bad."), "invalid_prompt", "Bad."),
        (ErrorFacts(504, "timeout_error", "Slow."), "server_error", "Slow."),
    ],
)  # fmt: skip
def test_st_11_codex_acts_on_the_code_of_a_failure(facts, code, message):
    frames = make_renderer().error(facts)

    failed = json.loads(frames.decode().split("\n\n")[-2].split("data: ")[1])
    assert failed["response"]["error"] == {"code": code, "message": message}


def test_a_stream_that_passes_through_keeps_its_own_response():
    theirs = stream([text("a")])
    renderer = DIALECT.renderer(AnswerContext("cd" * 16, 0, "smollm2"))

    with sdk(renderer.heartbeat() + theirs).responses.stream(model="m", input="x") as events:
        assert events.get_final_response().id == f"resp_{REQUEST_ID}"
    assert names(read_events(renderer.error(GONE))) == ["error", "failed"]


def test_the_sdk_puts_a_stream_together():
    deltas = [thought("hm"), text("Let me "), text("see"), *call(0, "shell", '{"cmd":"ls"}'), *call(1, "crm__note")]

    with sdk(stream(deltas, FinishReason.TOOL_CALLS)).responses.stream(model="m", input="x") as events:
        final = events.get_final_response()

    assert final.output_text == "Let me see"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert final.usage is not None
    assert final.usage.total_tokens == 39


def test_the_sdk_reads_a_whole_answer():
    body = json.dumps(whole([text("Hello")])).encode()

    response = sdk(body, content_type="application/json").responses.create(model="m", input="x")

    assert response.output_text == "Hello"
    assert response.status == "completed"


def test_a_name_that_the_model_invented_is_told_as_it_is():
    (item,) = whole(call(0, "nothing", "{}"))["output"]

    assert (item["type"], item["name"]) == ("function_call", "nothing")
