"""JSON with comments and trailing commas, as editors write it: a tree that knows where each value stands. Pure.

Messages quote nothing of the text but names of members: a value may be a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Any

_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)
_MAX_DEPTH = 100


class CommentedJsonError(ValueError):
    """The text is not one JSON object."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Node:
    """A value at text[start:end]."""

    start: int
    end: int
    value: Any
    members: tuple[Member, ...] = ()  # of an object: all of them in order, doubled ones included

    def find(self, name: str) -> Member | None:
        """The last of that name counts, as it does for every parser."""
        return next((member for member in reversed(self.members) if member.name == name), None)


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    start: int  # of the name's opening quote
    node: Node


def parse_object(text: str) -> Node:
    """The one object that is the text. Raises CommentedJsonError."""
    reader = _Reader(text)
    node = reader.node(0)
    if reader.peek():
        raise reader.error("something follows the end of the JSON value")
    if not isinstance(node.value, dict):
        raise CommentedJsonError("the file must hold one JSON object", 1)
    return node


def skip_blank(text: str, position: int) -> int:
    """Past blanks and comments."""
    match = _BLANK.match(text, position)
    assert match is not None
    return match.end()


def line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _refuse_constant(_name: str) -> Any:
    raise JSONDecodeError("no JSON", "", 0)  # NaN and Infinity


_DECODER = JSONDecoder(parse_constant=_refuse_constant)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, message: str) -> CommentedJsonError:
        return CommentedJsonError(message, line_at(self.text, self.position))

    def peek(self) -> str:
        self.position = skip_blank(self.text, self.position)
        if self.text.startswith("/*", self.position):
            raise self.error("a comment is not closed")
        return self.text[self.position : self.position + 1]

    def take(self, character: str) -> bool:
        if self.peek() != character:
            return False
        self.position += 1
        return True

    def node(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self.error("the values are nested too deeply")
        first, start = self.peek(), self.position
        if first == "{":
            members = self._members(depth)
            return Node(start, self.position, {member.name: member.node.value for member in members}, members)
        value = self._items(depth) if first == "[" else self._scalar()
        return Node(start, self.position, value)

    def _members(self, depth: int) -> tuple[Member, ...]:
        self.take("{")
        members: list[Member] = []
        while not self.take("}"):
            if self.peek() != '"':
                raise self.error('expected "name" or }')
            start, name = self.position, self._scalar()
            if not self.take(":"):
                raise self.error(f"expected : after {name!r}")
            members.append(Member(name, start, self.node(depth + 1)))
            if not self.take(",") and self.peek() != "}":
                raise self.error("expected , or }")
        return tuple(members)

    def _items(self, depth: int) -> list[Any]:
        self.take("[")
        items: list[Any] = []
        while not self.take("]"):
            items.append(self.node(depth + 1).value)
            if not self.take(",") and self.peek() != "]":
                raise self.error("expected , or ]")
        return items

    def _scalar(self) -> Any:
        first = self.peek()
        if not first:
            raise self.error("the file ends in the middle of a value")
        try:
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except JSONDecodeError as error:
            if first == '"':
                raise CommentedJsonError(f"a string is not valid: {error.msg}", error.lineno) from None
            raise self.error("expected a value: string, number, true, false, null, object or list") from None
        except ValueError:  # of Python, which reads whole numbers of a few thousand digits at most
            raise self.error("a number is too long") from None
        return value
