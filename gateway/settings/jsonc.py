"""JSON with comments and trailing commas, as editors write it, with the line of every member. Knows no settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from typing import Any

_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?P<fraction>\.\d+)?(?P<exponent>[eE][-+]?\d+)?")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 100
_DECODER = JSONDecoder()


class JsoncError(ValueError):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Member:
    """One `"name": value`; the value of an object is its list of members, so that nothing is lost."""

    name: str
    value: Any
    line: int


@dataclass
class Document:
    members: list[Member] = field(default_factory=list)


def parse_object(text: str) -> list[Member]:
    """The members of the outermost object, in order, doubled ones included."""
    reader = _Reader(text)
    value = reader.value(0)
    reader.skip()
    if reader.position != len(text):
        raise reader.error("something follows the end of the JSON value")
    if not isinstance(value, Document):
        raise JsoncError("the file must hold one JSON object", 1)
    return value.members


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, message: str) -> JsoncError:
        return JsoncError(message, self.line())

    def line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def skip(self) -> None:
        match = _BLANK.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        if self.text.startswith("/*", self.position):
            raise self.error("a comment is not closed")

    def peek(self) -> str:
        self.skip()
        return self.text[self.position : self.position + 1]

    def take(self, character: str) -> bool:
        if self.peek() != character:
            return False
        self.position += 1
        return True

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self.error("the values are nested too deeply")
        match self.peek():
            case "{":
                return Document(self.members(depth))
            case "[":
                return self.items(depth)
            case '"':
                return self.string()
            case "":
                raise self.error("the file ends in the middle of a value")
            case _:
                return self.word()

    def members(self, depth: int) -> list[Member]:
        self.take("{")
        members: list[Member] = []
        while not self.take("}"):
            if self.peek() != '"':
                raise self.error('expected "name" or }')
            line = self.line()
            name = self.string()
            if not self.take(":"):
                raise self.error(f"expected : after {name!r}")
            members.append(Member(name, self.value(depth + 1), line))
            if not self.take(",") and self.peek() != "}":
                raise self.error("expected , or }")
        return members

    def items(self, depth: int) -> list[Any]:
        self.take("[")
        items: list[Any] = []
        while not self.take("]"):
            items.append(self.value(depth + 1))
            if not self.take(",") and self.peek() != "]":
                raise self.error("expected , or ]")
        return items

    def string(self) -> str:
        try:
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except JSONDecodeError as error:
            # The message quotes nothing of the text, which may be a key.
            raise JsoncError(f"a string is not valid: {error.msg}", error.lineno) from None
        return str(value)

    def word(self) -> Any:
        for word, value in _WORDS.items():
            if self.text.startswith(word, self.position):
                self.position += len(word)
                return value
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self.error("expected a value: string, number, true, false, null, object or list")
        self.position = match.end()
        return float(match.group()) if match["fraction"] or match["exponent"] else int(match.group())
