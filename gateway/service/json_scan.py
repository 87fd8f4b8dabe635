"""Follows one JSON object while it is written: whether it may still become one, and where it ends. Pure.

Literal line ends in strings are let pass, as models write them. Escapes of four digits are left to a JSON parser.
"""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_LITERAL = 400  # characters of a number
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(r"-?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]*)?")
_STRING_STOP = re.compile(r'["\\]')
_SPACE = " \t\n\r"


class BrokenJson(Exception):
    """No text that follows can make this JSON."""


class _Expected(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of what is open
    STRING = auto()
    ESCAPE = auto()
    LITERAL = auto()


class JsonScan:
    """One object. What it says doesn't depend on how its text was cut."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that close what is open
        self._expected = _Expected.VALUE
        self._in_key = False
        self._literal = ""

    def push(self, text: str) -> int | None:
        """Where the object ends in `text`, None if beyond it. Raises `BrokenJson`."""
        position = 0
        while position < len(text):
            if self._expected is _Expected.STRING:
                stop = _STRING_STOP.search(text, position)
                if stop is None:
                    return None
                position = stop.end()
                self._leave_string(stop.group())
                continue
            self._take(text[position])
            position += 1
            if not self._open:
                return position
        return None

    def _leave_string(self, character: str) -> None:
        if character == "\\":
            self._expected = _Expected.ESCAPE
        else:
            self._expected = _Expected.COLON if self._in_key else _Expected.NEXT

    def _take(self, character: str) -> None:
        if self._expected is _Expected.ESCAPE:
            self._need(character in '"\\/bfnrtu')
            self._expected = _Expected.STRING
        elif self._expected is _Expected.LITERAL and self._goes_on(character):
            return
        elif character in _SPACE:
            self._need(bool(self._open))
        elif self._expected in (_Expected.VALUE, _Expected.VALUE_OR_END):
            self._value(character)
        elif self._expected in (_Expected.KEY, _Expected.KEY_OR_END):
            self._key(character)
        elif self._expected is _Expected.COLON:
            self._need(character == ":")
            self._expected = _Expected.VALUE
        else:
            self._next(character)

    def _goes_on(self, character: str) -> bool:
        """Whether a number or a word does; if not, it is judged as a whole."""
        if character not in _SPACE and character not in ",]}":
            self._literal += character
            words = any(word.startswith(self._literal) for word in ("true", "false", "null"))
            self._need(len(self._literal) <= MAX_LITERAL)
            self._need(words or _NUMBER_SO_FAR.fullmatch(self._literal) is not None)
            return True
        self._need(_LITERAL.fullmatch(self._literal) is not None)
        self._expected = _Expected.NEXT
        return False

    def _value(self, character: str) -> None:
        if character == "{":
            self._open.append("}")
            self._expected = _Expected.KEY_OR_END
            return
        self._need(bool(self._open))  # the whole is an object
        if character == "]" and self._expected is _Expected.VALUE_OR_END:
            self._close()
        elif character == "[":
            self._open.append("]")
            self._expected = _Expected.VALUE_OR_END
        elif character == '"':
            self._in_key, self._expected = False, _Expected.STRING
        else:
            self._need(character in "-0123456789tfn")
            self._literal, self._expected = character, _Expected.LITERAL

    def _key(self, character: str) -> None:
        if character == "}" and self._expected is _Expected.KEY_OR_END:
            self._close()
            return
        self._need(character == '"')
        self._in_key, self._expected = True, _Expected.STRING

    def _next(self, character: str) -> None:
        if character == ",":
            self._expected = _Expected.KEY if self._open[-1] == "}" else _Expected.VALUE
            return
        self._need(character == self._open[-1])
        self._close()

    def _close(self) -> None:
        self._open.pop()
        self._expected = _Expected.NEXT

    def _need(self, condition: bool) -> None:
        if not condition:
            raise BrokenJson
