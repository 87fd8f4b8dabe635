"""Arguments of a tool call: the object of some APIs against OpenAI's string of JSON, both ways. Pure.

A model may write what is no JSON object. Nothing of it is lost and no session fails on it: it becomes the only field of
an object, `{"_raw": "..."}`. Nothing written at all is an empty object.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

RAW_KEY = "_raw"
_EMPTY = ("", "null")
_object = msgspec.json.Decoder(dict[str, Any])


def arguments_text(value: object) -> str:
    """The string of what the history holds. Keys keep their order, spaces are those that models write."""
    if isinstance(value, str):
        return _text_of_string(value)
    if value is None:
        return "{}"
    return _dumps(value if isinstance(value, dict) else {RAW_KEY: _dumps(value)})


def _text_of_string(value: str) -> str:
    if value.strip() in _EMPTY:
        return "{}"
    return value if is_object(value) else _dumps({RAW_KEY: value})


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def input_value(arguments: str) -> msgspec.Raw:
    """The object of a call that is told in one piece: the model's own bytes where they are an object."""
    text = arguments.strip()
    if text in _EMPTY:
        return msgspec.Raw(b"{}")
    return msgspec.Raw((text if is_object(text) else _dumps({RAW_KEY: arguments})).encode())


def is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True


class ArgumentsWriter:
    """Arguments as they are streamed. What begins like an object is passed on at once, anything else when it's whole.

    An object that turns out to be broken has been sent by then, as Anthropic's own API does: clients tell the model.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._is_object: bool | None = None  # None: nothing but space so far

    def push(self, text: str) -> str:
        """What to send now."""
        self._parts.append(text)
        if self._is_object:
            return text
        if self._is_object is None and (begun := text.lstrip()):
            self._is_object = begun.startswith("{")
            return begun if self._is_object else ""
        return ""

    def finish(self) -> str:
        """What is still to be sent."""
        written = "".join(self._parts)
        if self._is_object or written.strip() in _EMPTY:
            return ""
        return _dumps({RAW_KEY: written})

    @property
    def complete(self) -> bool:
        return bool(self._is_object) and is_object("".join(self._parts))
