"""JSON with comments and trailing commas, as a tree that knows where each value stands. Knows no settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Any

from gateway.clients.document import DocumentError

_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)
_MAX_DEPTH = 100


def _refuse_constant(name: str) -> Any:
    raise DocumentError(f"{name} is no JSON value")


_DECODER = JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True, slots=True)
class Node:
    """A value at text[start:end]. `members` is None unless it is an object."""

    start: int
    end: int
    value: Any
    members: tuple[Member, ...] | None = None

    def find(self, name: str) -> Member | None:
        """The last of that name counts, as it does for every parser."""
        return next((member for member in reversed(self.members or ()) if member.name == name), None)


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    start: int  # of the name's opening quote
    node: Node


def parse(text: str) -> Node:
    """The one value of the text."""
    reader = _Reader(text)
    node = reader.node(0)
    if reader.peek():
        raise reader.error("something follows the end of the JSON value")
    return node


def skip_blank(text: str, position: int) -> int:
    """Past blanks and comments."""
    match = _BLANK.match(text, position)
    assert match is not None
    return match.end()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, message: str) -> DocumentError:
        return DocumentError(f"line {self.text.count(chr(10), 0, self.position) + 1}: {message}")

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
            return Node(start, self.position, {m.name: m.node.value for m in members}, members)
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
        if not self.peek():
            raise self.error("the file ends in the middle of a value")
        try:
            # The message of the decoder quotes nothing of the text, which may be a key.
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except JSONDecodeError:
            raise self.error("expected a value: string, number, true, false, null, object or list") from None
        return value
