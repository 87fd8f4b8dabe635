"""The prompt of a turn begins the prompt of the next, whatever clients move around; and its length can be asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic import types
from anthropic_support import USAGE, make_renderer
from generated_turns import TURNS, Turn, answer_in, assert_each_begins_the_next, assert_it_said
from hypothesis import given, settings

from backends.protocol.messages import ChatPrompt
from gateway.dialects.anthropic_messages import count_tokens_request, parse, to_chat
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.sampling import Defaults

BILLING = "x-anthropic-billing-header: cc_version=2.1.0.aaa; cc_entrypoint=cli; cch={};"
MARK = {"cache_control": {"type": "ephemeral"}}


def prompt_of(body: dict[str, Any]) -> ChatPrompt:
    prompt = parse(body, Defaults()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def asking(system: Any, text: str = "hi") -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "system": system, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    "system",
    [
        lambda nonce: [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": "You are here."}],
        lambda nonce: [{"type": "text", "text": f"{BILLING.format(nonce)}\nYou are here."}],
        lambda nonce: f"{BILLING.format(nonce)}\nYou are here.",
        lambda nonce: f"{BILLING.format(nonce)}\n\nYou are here.",
    ],
)
def test_an_04_a_billing_line_that_changes_leaves_the_local_prompt_as_it_was(system: Any) -> None:
    first, second = prompt_of(asking(system("11111"))), prompt_of(asking(system("22222")))

    assert first == second
    assert first.messages[0] == {"role": "system", "content": "You are here."}


def test_an_04_an_upstream_gets_the_billing_line() -> None:
    system = [{"type": "text", "text": BILLING.format("11111")}, {"type": "text", "text": "You"}]
    assert to_chat(asking(system)).fields["messages"][0]["content"] == f"{BILLING.format('11111')}\n\nYou"


@pytest.mark.parametrize("where", ["system", "messages"])
def test_an_04_text_that_only_mentions_the_line_is_untouched(where: str) -> None:
    text = f"What is {BILLING.format('1')}?" if where == "system" else BILLING.format("1")
    read = prompt_of(asking(text) if where == "system" else asking("S", text)).messages
    assert any(message["content"] == text for message in read)


def test_a_system_prompt_of_nothing_but_the_billing_line_is_none() -> None:
    assert [message["role"] for message in prompt_of(asking(BILLING.format("1"))).messages] == ["user"]


# ------------------------------------------------------------------------------------------------------------- turns


def answer_of(turn: Turn, number: int) -> list[dict[str, Any]]:
    """The content that a client gets from us and sends back."""
    message = types.Message.model_validate_json(make_renderer().whole([answer_in(turn, number)], USAGE))
    content: list[dict[str, Any]] = [block.to_dict() for block in message.content]
    return content


def next_turn(content: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": f"r{turn}"}]}
        for block in content
        if block["type"] == "tool_use"
    ]
    return results or [{"type": "text", "text": f"q{turn}"}]


def conversation(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The bodies of one conversation. The last block carries the marker, as Claude Code has it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    bodies = []
    for number, turn in enumerate(turns):
        system = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": "S"} | MARK]
        marked = json.loads(json.dumps(messages))
        marked[-1]["content"][-1] |= MARK
        bodies.append({"model": "m", "max_tokens": 5, "system": system, "messages": marked})
        content = answer_of(turn, number)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": next_turn(content, number)}]
    return bodies


@settings(derandomize=True, max_examples=60, deadline=None)
@given(TURNS)
def test_kv_15_the_messages_of_a_turn_begin_those_of_the_next(turns: Any) -> None:
    assert_each_begins_the_next([prompt_of(body).messages for body in conversation(turns)])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(TURNS)
def test_kv_15_what_the_model_said_comes_back_to_it_as_it_was(turns: Any) -> None:
    read = prompt_of(conversation(turns)[-1]).messages

    assert_it_said(read, turns)


# ------------------------------------------------------------------------------------------------------------- count


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}},
    ],
)
def test_an_03_tokens_are_counted_of_the_very_prompt_that_a_request_sends(fields: dict[str, Any]) -> None:
    body = {
        "model": "m",
        "system": [{"type": "text", "text": BILLING.format("1")}, {"type": "text", "text": "S"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | MARK]}],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
    } | fields

    form = count_tokens_request(body)

    assert parse_chat(form.fields, Defaults()).prompt == parse(body | {"max_tokens": 5}, Defaults()).prompt


def test_an_03_a_prefill_is_counted_as_one() -> None:
    body = asking("S") | {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]}
    assert parse_chat(count_tokens_request(body).fields, Defaults()).prompt == prompt_of(body)
