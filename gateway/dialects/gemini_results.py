"""Calls of functions and their results, which Gemini's clients may send without ids. Pure."""

from __future__ import annotations

import json
from typing import Any

from gateway.dialects.chat_turns import BETWEEN_TEXTS, ChatPart
from gateway.dialects.fields import kind, refuse
from gateway.dialects.gemini_parts import Part, user_part
from gateway.dialects.gemini_spelling import fields_at
from gateway.dialects.object_arguments import arguments_text
from gateway.dialects.reading import Reading, filled_string_at

_BELOW = "[{} attached below]"


class CallIds:
    """Ids of a conversation's calls. One that was left out is made of the call's number, the same in every turn.

    A result without an id belongs to the first call of that name that has none yet.
    """

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # id and name of calls that have no result yet

    def of_call(self, said: str, name: str) -> str:
        call_id = said or self._next()
        self._open.append((call_id, name))
        return call_id

    def of_result(self, said: str, name: str) -> str:
        for call in self._open:
            if call[0] == said if said else call[1] == name:
                self._open.remove(call)
                return call[0]
        return said or self._next()

    def _next(self) -> str:
        self._count += 1
        return f"call_{self._count}"


def tool_call(part: Part, ids: CallIds, reading: Reading) -> dict[str, Any]:
    path = f"{part.path}.functionCall"
    fields = fields_at(part.value, path)
    name, call_id = filled_string_at(fields, "name", path), _id(fields, path)
    arguments = fields.get("args")
    if arguments is not None and not isinstance(arguments, dict):
        refuse(f"`{path}.args` must be an object, not {kind(arguments)}.", f"{path}.args")
    function = {"name": reading.tool_name(name), "arguments": arguments_text(arguments)}
    return {"id": ids.of_call(call_id, name), "type": "function", "function": function}


def tool_result(part: Part, ids: CallIds, reading: Reading) -> tuple[dict[str, Any], list[ChatPart]]:
    """A tool message, and what can't stand in one and goes to the user's."""
    path = f"{part.path}.functionResponse"
    fields = fields_at(part.value, path)
    name, call_id = filled_string_at(fields, "name", path), _id(fields, path)
    texts, attached = [_text(fields.get("response"), path)], []
    for media in _media(fields, path):
        read = user_part(media, reading)
        if read["type"] == "text":
            texts.append(read["text"])
        else:
            texts.append(_BELOW.format(read["type"]))
            attached.append(read)
    content = BETWEEN_TEXTS.join(text for text in texts if text)
    return {"role": "tool", "tool_call_id": ids.of_result(call_id, name), "content": content}, attached


def _id(fields: dict[str, Any], path: str) -> str:
    value = fields.get("id", "")
    if not isinstance(value, str):
        refuse(f"`{path}.id` must be a string, not {kind(value)}.", f"{path}.id")
    return value


def _text(response: object, path: str) -> str:
    """By that API's words: `output` is the result and `error` a failure; without either the whole is the result."""
    if response is None:
        return ""
    if not isinstance(response, dict):
        refuse(f"`{path}.response` must be an object, not {kind(response)}.", f"{path}.response")
    if response and response.keys() <= {"output", "error"}:
        failure = [f"[error]\n\n{_shown(response['error'])}"] if response.get("error") else []
        result = [_shown(response["output"])] if response.get("output") is not None else []
        return BETWEEN_TEXTS.join(failure + result)
    return _shown(response)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _media(fields: dict[str, Any], path: str) -> list[Part]:
    value = fields.get("parts", [])
    if not isinstance(value, list):
        refuse(f"`{path}.parts` must be an array, not {kind(value)}.", f"{path}.parts")
    found: list[Part] = []
    for index, item in enumerate(value):
        inner = fields_at(item, f"{path}.parts[{index}]")
        found += [Part(f"{path}.parts[{index}]", name, inner[name], returned=True) for name in inner]
    return found
