"""Generated answers and conversations of the Responses dialect: the vendor's client can read every stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from generated_answers import text, thought
from hypothesis import given, settings
from hypothesis import strategies as st
from responses_support import (
    TOOLS,
    USAGE,
    EventGrammar,
    call,
    check,
    make_renderer,
    read_events,
    sdk,
    stream,
    whole,
)

from gateway.core.errors import InvalidRequest
from gateway.core.types import Delta, FinishReason, ToolCallDelta
from gateway.dialects.base import ErrorFacts
from gateway.dialects.openai_responses import parse, to_chat
from gateway.dialects.responses_conversation import expand
from gateway.dialects.sampling import Defaults

words = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=12)
pieces = st.lists(words, min_size=1, max_size=3)
reasons = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS])
called = st.sampled_from(["shell", "apply_patch", "crm__find", "crm__note", "invented"])
arguments = st.one_of(
    st.dictionaries(st.sampled_from(["input", "cmd"]), words, max_size=2).map(json.dumps), st.just(""), words
)
GONE = ErrorFacts(502, "upstream_error", "It died.", None, "upstream_gone")
modest = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def answers(draw: st.DrawFn, *, in_order: bool = False) -> list[Delta]:
    """Reasoning, text and calls; `in_order`: as one message of chat has them."""
    kinds = ["thought", "text", "call"]
    chosen = draw(st.lists(st.sampled_from(kinds), max_size=5))
    if in_order:
        chosen = sorted((k for i, k in enumerate(chosen) if k == "call" or k not in chosen[:i]), key=kinds.index)
    deltas: list[Delta] = []
    num_calls = 0
    for kind in chosen:
        if kind == "call":
            said = draw(arguments)
            cut = draw(st.integers(0, len(said)))
            deltas += call(num_calls, draw(called), said[:cut], said[cut:])
            num_calls += 1
        else:
            deltas += [(text if kind == "text" else thought)(piece) for piece in draw(pieces)]
    return deltas


@modest
@given(answers(), reasons, st.sets(st.integers(0, 12)))
def test_every_stream_is_valid_and_read_by_the_sdk(deltas, reason, beats):
    renderer = make_renderer()
    frames = renderer.heartbeat() if 0 in beats else b""
    frames += renderer.begin(None) + renderer.start(0)
    for number, delta in enumerate(deltas, start=1):
        frames += renderer.delta(delta) + (renderer.heartbeat() if number in beats else b"")
    frames += renderer.end(0, reason) + renderer.finish(USAGE)

    events = read_events(frames)

    check(events)
    with sdk(frames).responses.stream(model="m", input="x") as seen:
        last = list(seen)[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert [item.id for item in last.response.output] == [item["id"] for item in events[-1]["response"]["output"]]


@modest
@given(answers(), st.integers(0, 20))
def test_st_10_a_stream_that_dies_anywhere_fails_once(deltas, position):
    renderer = make_renderer()
    frames = renderer.begin(None) if position else b""
    frames += b"".join(renderer.delta(delta) for delta in deltas[: max(0, position - 1)])

    events = read_events(frames + renderer.error(GONE))

    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    grammar = EventGrammar()
    for event in events:
        if event["type"] not in ("error", "response.failed"):
            grammar.take(event)
    assert not grammar.ended
    assert renderer.conversation() is None


@modest
@given(answers(in_order=True), reasons)
def test_a_stream_and_a_whole_answer_say_the_same(deltas, reason):
    streamed = read_events(stream(deltas, reason))[-1]["response"]

    assert whole(deltas, reason) == streamed


@modest
@given(answers(), st.data())
def test_how_arguments_are_cut_changes_nothing(deltas, data):
    cut: list[Delta] = []
    for delta in deltas:
        cut.append(delta)
        if isinstance(delta, ToolCallDelta) and len(delta.arguments) > 1:
            at = data.draw(st.integers(1, len(delta.arguments) - 1))
            cut[-1:] = [
                ToolCallDelta(0, delta.call, delta.call_id, delta.name, delta.arguments[:at]),
                ToolCallDelta(0, delta.call, delta.call_id, "", delta.arguments[at:]),
            ]

    assert read_events(stream(cut))[-1] | {"sequence_number": 0} == read_events(stream(deltas))[-1] | {
        "sequence_number": 0
    }


ITEM_KEYS = (
    "role", "content", "output", "call_id", "id", "name", "namespace", "arguments", "input", "summary", "action",
    "tools", "items", "encrypted_content", "image_url", "text", "file_data", "description", "parameters", "format",
)  # fmt: skip
ITEM_TYPES = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "web_search_call", "item_reference", "kvgate_history",
    "additional_tools", "tool_search_output", "function", "custom", "namespace", "input_text", "input_image", "odd",
    "allowed_tools",
)  # fmt: skip
BODY_KEYS = (
    "tools", "tool_choice", "text", "reasoning", "include", "metadata", "instructions", "max_output_tokens",
    "previous_response_id", "store", "temperature", "top_logprobs", "truncation", "parallel_tool_calls", "stop",
    "conversation", "prompt", "user", "chat_template_kwargs", "n", "background",
)  # fmt: skip
SCALARS = (None, True, 0, 1, -1, 0.5, "", "a", "user", "assistant", "system", "{}", "auto", "required", "lark")


def some_json(random: Random, depth: int = 0) -> Any:
    """JSON that is nearly a body's part, so that readers are entered, and then met with what they don't expect."""
    kind = random.random()
    if depth > 4 or kind < 0.35:
        return random.choice(SCALARS)
    if kind < 0.6:
        return [some_json(random, depth + 1) for _ in range(random.randrange(3))]
    found = {key: some_json(random, depth + 1) for key in random.sample(ITEM_KEYS, random.randrange(5))}
    return found | ({"type": random.choice(ITEM_TYPES)} if random.random() < 0.9 else {})


@pytest.mark.parametrize("seed", range(20))
def test_rv_13_a_body_is_understood_or_refused_by_the_name_of_a_field(seed):
    random = Random(seed)
    for _ in range(200):
        items = [some_json(random) for _ in range(random.randrange(1, 4))]
        body = {key: some_json(random) for key in random.sample(BODY_KEYS, random.randrange(3))} | {"input": items}
        params = [refused_param(to_chat, body), refused_param(lambda it: to_chat(expand(it, {}.get)), body)]
        params.append(refused_param(lambda it: parse(it, Defaults()), body))
        assert "" not in params


def refused_param(read: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> str | None:
    try:
        read(body)
    except InvalidRequest as error:
        return error.param or ""
    return None


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[list[Any], list[Delta]]]:
    """What the user says, and what is answered to it."""
    count = draw(st.integers(2, 5))
    return [([{"role": "user", "content": draw(words)}], draw(answers(in_order=True))) for _ in range(count)]


def results_of(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    calls = [item for item in output if item["type"] in kinds]
    return [{"type": kinds[item["type"]], "call_id": item["call_id"], "output": "done"} for item in calls]


@modest
@given(turns())
def test_kv_15_the_messages_of_a_turn_begin_those_of_the_next(conversation):
    history: list[Any] = []
    before: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for asked, deltas in conversation:
        history += [*results, *asked]
        body = {"model": "m", "instructions": "Be brief.", "input": history, "tools": TOOLS}
        messages = to_chat(body).fields["messages"]
        assert messages[: len(before)] == before
        assert parse(body, Defaults()).prompt.tools == to_chat({**body, "input": "x"}).fields["tools"]
        before = messages
        output = whole(deltas)["output"]
        history += output
        results = results_of(output)


@modest
@given(turns())
def test_a_conversation_by_id_is_the_one_that_is_sent_whole(conversation):
    kept: dict[str, Any] = {}
    history: list[Any] = []
    results: list[dict[str, Any]] = []
    previous = None
    for number, (asked, deltas) in enumerate(conversation):
        new = [*results, *asked]
        history += new
        body = {"model": "m", "instructions": "Be brief.", "tools": TOOLS}
        by_id = expand({**body, "input": new, "previous_response_id": previous}, kept.get)
        assert to_chat(by_id).fields == to_chat({**body, "input": history}).fields
        renderer = make_renderer(f"{number:032x}", input=history)
        output = whole(deltas, renderer=renderer)["output"]
        remembered = renderer.conversation()
        assert remembered is not None
        previous = remembered[0]
        kept[previous] = json.loads(json.dumps(remembered[1]))
        history += output
        results = results_of(output)
