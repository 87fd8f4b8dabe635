"""What a call is as JSON: `{"name": ..., "arguments": {...}}` and the variants that models write. Pure.

Arguments may be called `parameters`, may be a string of JSON, null or left out; the whole may be wrapped as
`{"type": "function", "function": {...}}`. A call of a function that the request doesn't have is none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_HEAD = 400  # characters within which the first key and a name that follows it must be over
_KEYS = frozenset({"name", "arguments", "parameters", "function", "type", "id"})
_HEAD = re.compile(r'\{\s*(?:"([^"\\]*)("?))?(?:\s*:\s*"([^"\\]*)("?))?')
_space = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class FoundCall:
    name: str
    arguments: str  # JSON of an object


def can_be_call(head: str, names: frozenset[str]) -> bool:
    """Whether an object that begins so may be a call, judged by its first key, and by its name if that comes first.

    It never says no to what `read_call` takes.
    """
    found = _HEAD.match(head)
    if found is None:
        return True
    key, key_ends, value, value_ends = found.groups()
    if key is None or not key_ends:
        return len(key or "") < MAX_HEAD
    if key not in _KEYS:
        return False
    return key != "name" or not value_ends or value in names


def read_call(text: str, names: frozenset[str]) -> FoundCall | None:
    """`text` is an object by `JsonScan`. None: it is no call."""
    try:
        members = _members(text)
        if not members or next(iter(members)) not in _KEYS:
            return None
        inner = members.get("function", "")
        if inner.startswith("{") and "name" not in members:
            members = _members(inner)
        name = _loads(members.get("name", "null"))
        if not isinstance(name, str) or name not in names:
            return None
        arguments = object_text(members.get("arguments", members.get("parameters", "null")))
    except (ValueError, RecursionError):
        return None
    return None if arguments is None else FoundCall(name, arguments)


def object_text(raw: str) -> str | None:
    """Arguments as JSON of an object, spelt as the model did where that is JSON. None: they are something else."""
    value = _loads(raw)
    if isinstance(value, str):
        raw = value.strip() or "null"
        try:
            value = _loads(raw)
        except ValueError:
            return None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        return None
    return raw if _is_strict(raw) else json.dumps(value)


def _members(text: str) -> dict[str, str]:
    """The members of an object as they are spelt."""
    found: dict[str, str] = {}
    position = _skip(text, 1)
    while text[position] != "}":
        key, position = _decoder.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)
        _, position = _decoder.raw_decode(text, start)
        found[key] = text[start:position]
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return found


def _skip(text: str, position: int) -> int:
    space = _space.match(text, position)
    return space.end() if space is not None else position


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


_decoder = json.JSONDecoder(strict=False, parse_constant=_no_json)


def _loads(text: str) -> Any:
    return _decoder.decode(text)


def _is_strict(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_json)
    except ValueError:
        return False
    return True
