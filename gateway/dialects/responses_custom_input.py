"""The text of a custom tool's call, read out of JSON arguments while the model writes them. Pure."""

from __future__ import annotations

import re

import msgspec

from gateway.dialects.responses_tools import CUSTOM_ARGUMENT

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_MAX_OPENING = 64  # characters within which the opening must be there, or there is nothing to stream
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_UNIT = re.compile(r"\\u([0-9a-fA-F]{4})")


class CustomInput:
    """One call. What it gives out, joined, is the input; the same however the arguments were cut."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._given: list[str] = []
        self._head = ""  # until the opening is found
        self._rest = ""  # an escape that isn't complete yet
        self._state = "opening"  # then "text", then "ended"; or "other": not of the expected shape

    def push(self, arguments: str) -> str:
        """The new text of the input."""
        self._arguments.append(arguments)
        if self._state == "opening":
            self._head += arguments
            opening = _OPENING.match(self._head)
            if opening is None:
                self._state = "opening" if len(self._head) < _MAX_OPENING else "other"
                return ""
            self._state, arguments = "text", self._head[opening.end() :]
        return self._give(self._text(arguments)) if self._state == "text" else ""

    def finish(self) -> tuple[str, str]:
        """What is still missing, and the whole input. Arguments of another shape are the input as they are."""
        given, arguments = "".join(self._given), "".join(self._arguments)
        whole = _whole(arguments)
        if self._state in ("opening", "other"):
            return (arguments, arguments) if whole is None else (whole, whole)
        if whole is not None and whole.startswith(given):
            return whole[len(given) :], whole
        return "", given  # not quite JSON, or cut off: what was read is all that there is

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
        return text

    def _text(self, arguments: str) -> str:
        text, position, out = self._rest + arguments, 0, []
        self._rest = ""
        while position < len(text):
            if text[position] == '"':
                self._state = "ended"
                break
            if text[position] != "\\":
                plain = _PLAIN.match(text, position)
                assert plain is not None
                out.append(plain.group())
                position = plain.end()
                continue
            escape = _escape(text, position)
            if escape is None:
                self._rest = text[position:]
                break
            out.append(escape[0])
            position += escape[1]
        return "".join(out)


def _escape(text: str, position: int) -> tuple[str, int] | None:
    """The character that the escape stands for and its length; None if more of it has to come."""
    if position + 1 >= len(text):
        return None
    if text[position + 1] != "u":
        return _ESCAPES.get(text[position + 1], text[position + 1]), 2
    first = _UNIT.match(text, position)
    if first is None:
        return None if len(text) < position + 6 else ("\ufffd", 2)
    unit = int(first.group(1), 16)
    if 0xD800 <= unit < 0xDC00:
        return _pair(unit, text[position + 6 : position + 12])
    return ("\ufffd" if 0xDC00 <= unit < 0xE000 else chr(unit)), 6


def _pair(high: int, rest: str) -> tuple[str, int] | None:
    """The character of which `high` is the first half, if `rest` is the other."""
    second = _UNIT.match(rest)
    low = int(second.group(1), 16) if second is not None else 0
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), 12
    may_go_on = len(rest) < 6 and ("\\u".startswith(rest) or rest.startswith("\\u"))
    return None if may_go_on else ("\ufffd", 6)


def _whole(arguments: str) -> str | None:
    """The input that these arguments hold; None if it can't be told."""
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not isinstance(read, dict):
        return read if isinstance(read, str) else None
    value = read.get(CUSTOM_ARGUMENT)
    if value is None and len(read) == 1:  # the model chose another name for the one argument
        value = next(iter(read.values()))
    return value if isinstance(value, str) else None
