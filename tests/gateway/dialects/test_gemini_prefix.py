"""The prompt of a turn begins the prompt of the next; and its length can be asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gemini_support import THINKING, USAGE, make_renderer
from generated_turns import TURNS, Turn, answer_in, assert_each_begins_the_next, assert_it_said
from google.genai import types
from hypothesis import given, settings

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import InvalidRequest
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.gemini import count_tokens_request, parse
from gateway.dialects.sampling import Defaults

PROPERTY = settings(derandomize=True, max_examples=60, deadline=None)


def prompt_of(body: dict[str, Any]) -> ChatPrompt:
    prompt = parse(body, Defaults()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def answer_of(turn: Turn, number: int, *, with_ids: bool) -> dict[str, Any]:
    """The content that a client gets from us and sends back, as Google's package holds it."""
    said = types.GenerateContentResponse.model_validate_json(
        make_renderer(THINKING).whole([answer_in(turn, number)], USAGE)
    )
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
    for number, turn in enumerate(turns):
        bodies.append({"systemInstruction": {"parts": [{"text": "S"}]}, "contents": json.loads(json.dumps(contents))})
        content = answer_of(turn, number, with_ids=with_ids)
        contents += [content, next_turn(content, number)]
    return bodies


@pytest.mark.parametrize("with_ids", [True, False])
@PROPERTY
@given(turns=TURNS)
def test_kv_15_the_messages_of_a_turn_begin_those_of_the_next(with_ids: bool, turns: Any) -> None:
    assert_each_begins_the_next([prompt_of(body).messages for body in conversation(turns, with_ids=with_ids)])


@PROPERTY
@given(TURNS)
def test_kv_15_what_the_model_said_comes_back_to_it_as_it_was(turns: Any) -> None:
    read = prompt_of(conversation(turns, with_ids=True)[-1]).messages

    assert_it_said(read, turns)


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
