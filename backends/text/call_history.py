"""Calls and their results in earlier messages, brought to the form that a chat template can print. Pure.

What is done to a message depends on that message alone, so that the prompt of one turn begins that of the next.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def with_call_objects(messages: Sequence[Message]) -> list[Message]:
    """Arguments as objects, which most templates print as JSON themselves."""
    return [_map_calls(message, _with_object) for message in messages]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of nine letters and digits, the only ones that templates of Mistral take."""
    found = [_map_calls(message, _with_short_id) for message in messages]
    return [
        message | {"tool_call_id": short_id(message["tool_call_id"])} if message.get("tool_call_id") else message
        for message in found
    ]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message as messages of one call each, for templates that take no more."""
    found: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or [None]
        for number, call in enumerate(calls):
            part = message | {"tool_calls": [call]} if call is not None else message
            found.append(part if number == 0 else part | {"content": ""})
    return found


def in_words(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text in Hermes' form, for templates that know neither.

    A result becomes what a user says; results that follow one another become one message.
    """
    found: list[Message] = []
    in_results = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and in_results:
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n{_result(message)}"}
        elif is_result:
            found.append({"role": "user", "content": _result(message)})
        else:
            found.append(_with_calls_in_words(message))
        in_results = is_result
    return found


def arguments_object(arguments: object) -> dict[str, Any]:
    """What is no object stays readable under the name `_raw`: one bad call must not end a conversation."""
    if isinstance(arguments, str):
        text = arguments.strip()
        try:
            arguments = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            return {"_raw": text}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"_raw": arguments}


def short_id(identity: object) -> str:
    text = str(identity)
    return text if _SHORT_ID.fullmatch(text) else hashlib.blake2b(text.encode(errors="replace")).hexdigest()[:9]


def _map_calls(message: Message, change: Any) -> Message:
    calls = message.get("tool_calls")
    return message | {"tool_calls": [change(call) for call in calls]} if calls else message


def _with_object(call: Message) -> Message:
    function = call["function"]
    return call | {"function": function | {"arguments": arguments_object(function.get("arguments"))}}


def _with_short_id(call: Message) -> Message:
    return call | {"id": short_id(call.get("id") or "")}


def _with_calls_in_words(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message.get("content") else []
    parts += [call_in_words(call["function"]) for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": "\n".join(parts)}


def call_in_words(function: Message) -> str:
    call = {"name": function["name"], "arguments": arguments_object(function.get("arguments"))}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False, separators=(',', ':'))}\n</tool_call>"


def _result(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
