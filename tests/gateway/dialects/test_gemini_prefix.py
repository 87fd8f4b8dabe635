"""The prompt of a turn begins the prompt of the next; and its length can be asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from gemini_support import THINKING, USAGE, make_renderer
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import InvalidRequest
from gateway.core.types import ChoiceAnswer, FinishReason, ToolCall
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.gemini import count_tokens_request, parse
from gateway.dialects.sampling import Defaults

CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, min_size=1, max_size=12)
VALUES = st.one_of(TEXTS, st.integers(-99, 99), st.booleans(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["read", "a.b"]), ARGUMENTS), max_size=2)
TURNS = st.lists(st.tuples(st.text(CHARACTERS, max_size=6), TEXTS, CALLS), min_size=2, max_size=10)
PROPERTY = settings(derandomize=True, max_examples=60, deadline=None)


def prompt_of(body: dict[str, Any]) -> ChatPrompt:
    prompt = parse(body, Defaults()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def answer_of(
    reasoning: str, text: str, calls: list[tuple[str, dict[str, Any]]], turn: int, *, with_ids: bool
) -> dict[str, Any]:
    """The content that a client gets from us and sends back, as Google's package holds it."""
    made = [ToolCall(f"t{turn}_{i}", name, json.dumps(value)) for i, (name, value) in enumerate(calls)]
    choice = ChoiceAnswer(0, text, reasoning, calls=made, reason=FinishReason.STOP)
    said = types.GenerateContentResponse.model_validate_json(make_renderer(THINKING).whole([choice], USAGE))
    assert said.candidates is not None
    assert said.candidates[0].content is not None
    content: dict[str, Any] = said.candidates[0].content.model_dump(mode="json", by_alias=True, exclude_none=True)
    for part in content["parts"]:
        if "functionCall" in part and not with_ids:
            del part["functionCall"]["id"]  # many clients forget them
    return content


def next_turn(content: dict[str, Any], turn: int) -> dict[str, Any]:
    calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
    results = [{"functionResponse": _answered(call, f"r{turn}")} for call in calls]
    return {"role": "user", "parts": results or [{"text": f"q{turn}"}]}


def _answered(call: dict[str, Any], output: str) -> dict[str, Any]:
    """With the call's id, if the client kept it."""
    return {key: call[key] for key in ("id", "name") if key in call} | {"response": {"output": output}}


def conversation(turns: Any, *, with_ids: bool) -> list[dict[str, Any]]:
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "q"}]}]
    bodies = []
    for turn, (reasoning, text, calls) in enumerate(turns):
        bodies.append({"systemInstruction": {"parts": [{"text": "S"}]}, "contents": json.loads(json.dumps(contents))})
        content = answer_of(reasoning, text, calls, turn, with_ids=with_ids)
        contents += [content, next_turn(content, turn)]
    return bodies


@pytest.mark.parametrize("with_ids", [True, False])
@PROPERTY
@given(turns=TURNS)
def test_kv_15_the_messages_of_a_turn_begin_those_of_the_next(with_ids: bool, turns: Any) -> None:
    read = [prompt_of(body).messages for body in conversation(turns, with_ids=with_ids)]

    for earlier, later in pairwise(read):
        assert len(earlier) < len(later)
        assert json.dumps(later[: len(earlier)]) == json.dumps(earlier)  # the order of keys too


@PROPERTY
@given(TURNS)
def test_kv_15_what_the_model_said_comes_back_to_it_as_it_was(turns: Any) -> None:
    read = prompt_of(conversation(turns, with_ids=True)[-1]).messages

    said = [message for message in read if message["role"] == "assistant"]
    for message, (reasoning, text, calls) in zip(said, turns, strict=False):
        assert message["content"] == text
        assert message.get("reasoning_content", "") == reasoning
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert [(f["name"], json.loads(f["arguments"])) for f in functions] == calls


@PROPERTY
@given(TURNS)
def test_every_result_belongs_to_a_call_right_before_it(turns: Any) -> None:
    read = prompt_of(conversation(turns, with_ids=False)[-1]).messages
    open_ids: list[str] = []
    for message in read:
        if message["role"] == "tool":
            open_ids.remove(message["tool_call_id"])
        else:
            assert not open_ids
            open_ids = [call["id"] for call in message.get("tool_calls", [])]


# ------------------------------------------------------------------------------------------------------------- count

ASKED = {
    "systemInstruction": {"parts": [{"text": "S"}]},
    "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    "tools": [{"functionDeclarations": [{"name": "f"}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
    "generationConfig": {"maxOutputTokens": 5, "thinkingConfig": {"thinkingBudget": 0}},
}


@pytest.mark.parametrize("body", [ASKED, {"contents": ASKED["contents"]}, ASKED | {"toolConfig": {}}])
def test_tokens_are_counted_of_the_very_prompt_that_a_request_sends(body: dict[str, Any]) -> None:
    form = count_tokens_request({"model": "m", **body})
    assert parse_chat(form.fields, Defaults()).prompt == prompt_of(body)
    assert "max_tokens" not in form.fields


@pytest.mark.parametrize("name", ["generateContentRequest", "generate_content_request"])
def test_a_whole_request_in_the_count_is_what_is_counted(name: str) -> None:
    form = count_tokens_request({"model": "m", name: {"model": "models/m", **ASKED}})
    assert parse_chat(form.fields, Defaults()).prompt == prompt_of(ASKED)


def test_a_count_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="contents"):
        count_tokens_request({"model": "m"})
    with pytest.raises(InvalidRequest, match="generateContentRequest"):
        count_tokens_request({"generateContentRequest": 1})
