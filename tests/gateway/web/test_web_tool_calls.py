"""Calls and reasoning that a local model writes unasked, through the chat dialect: streamed and whole say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from web_support import Answer, local_settings, running

from backends.protocol.messages import Timings, Usage
from gateway.core.types import Finished, FinishReason, Started, TextDelta
from gateway.upstreams.scripted import ScriptedUpstream

CHAT = "/v1/chat/completions"
USAGE = Usage(prompt_tokens=3, completion_tokens=6)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "a.txt"}}\n</tool_call>'
GO = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
HERMES = {"tool_format": "hermes", "reasoning_format": "think", "template_takes_tools": True}


async def ask(
    text: str, *, reason: FinishReason = FinishReason.STOP, extra: dict[str, Any] | None = None, **body: Any
) -> Answer:
    """The model writes one letter a token."""
    letters = [TextDelta(letter, 1) for letter in text]
    engine = ScriptedUpstream([Started(3, 100), *letters, Finished(reason, USAGE, Timings())], extra=extra or HERMES)
    async with running(local_settings(), engine) as gateway:
        return await gateway.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | body)


def whole(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str]:
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]


def streamed(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str]:
    choices = [choice for chunk in answer.chunks() for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: list[list[str]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append([part["function"]["name"], ""])
        calls[part["index"]][1] += part["function"]["arguments"]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    said = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")]
    return said[0], said[1], [(name, arguments) for name, arguments in calls], reason


CASES = {
    "plain": ("Just text.", ("Just text.", "", [], "stop")),
    "one": (f"I look.\n{LOOK}", ("I look.\n", "", [("look", '{"at": "a.txt"}')], "tool_calls")),
    "two": (f"{LOOK}\n{GO}", ("", "", [("look", '{"at": "a.txt"}'), ("go", "{}")], "tool_calls")),
    "thought": (f"<think>\nHm.\n</think>\n\n{GO}", ("", "Hm.", [("go", "{}")], "tool_calls")),
    "unknown": (LOOK.replace("look", "fly"), (LOOK.replace("look", "fly"), "", [], "stop")),
}


@pytest.mark.parametrize("name", CASES)
async def test_tc_01_a_models_calls_are_calls(name):
    text, expected = CASES[name]
    assert whole(await ask(text)) == expected
    assert streamed(await ask(text, stream=True)) == expected


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_tc_12_a_call_that_breaks_off_is_text(reason):
    expected = (LOOK[:-20], "", [], reason.value)
    assert whole(await ask(LOOK[:-20], reason=reason)) == expected
    assert streamed(await ask(LOOK[:-20], reason=reason, stream=True)) == expected


async def test_st_31_reasoning_alone_is_no_text():
    text = "<think>\nHm, let me"
    expected = ("", "Hm, let me", [], "length")
    assert whole(await ask(text, reason=FinishReason.LENGTH)) == expected
    assert streamed(await ask(text, reason=FinishReason.LENGTH, stream=True)) == expected


async def test_without_tools_or_with_none_chosen_a_call_is_text():
    assert whole(await ask(LOOK, tool_choice="none"))[0] == LOOK
    assert whole(await ask(LOOK, tools=None))[0] == LOOK


async def test_an_allowed_subset_is_what_may_be_called():
    subset = [{"type": "function", "function": {"name": "go"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": subset}}
    assert whole(await ask(LOOK, tool_choice=choice)) == (LOOK, "", [], "stop")
    assert whole(await ask(GO, tool_choice=choice))[2] == [("go", "{}")]
    choice["allowed_tools"]["mode"] = "required"
    assert whole(await ask('{"name":"go","arguments":{}}', tool_choice=choice))[2:] == ([("go", "{}")], "tool_calls")


@pytest.mark.parametrize(
    "allowed",
    [
        {"mode": "maybe", "tools": [{"type": "function", "function": {"name": "go"}}]},
        {"mode": "auto", "tools": []},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "fly"}}]},
        {"mode": "auto", "tools": [7]},
        7,
    ],
)
async def test_a_subset_that_makes_no_sense_is_refused(allowed):
    answer = await ask("x", tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


async def test_how_the_model_was_told_of_the_tools_is_said():
    by_prompt = await ask("x", extra=HERMES | {"template_takes_tools": False})
    assert "told of the tools in a system message" in by_prompt.headers["X-Kvgate-Notice"]
    unknown = await ask("x", extra=HERMES | {"tool_format": ""})
    assert "come back as text" in unknown.headers["X-Kvgate-Notice"]


async def test_arguments_are_json_for_every_call():
    _, _, calls, _ = whole(await ask('{"name": "look", "parameters": "{\\"at\\": 1}"}'))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("look", {"at": 1})]
