"""Events of OpenAI's Responses as bytes: each has a name, a type and the next number. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode


class EventWriter:
    """The events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._next_number = 0

    def event(self, name: str, /, **fields: Any) -> bytes:
        return self.spliced(opening(name, **fields), b"")

    def spliced(self, head: bytes, tail: bytes) -> bytes:
        """An event of which most was encoded before: an `opening`, then more of its fields."""
        number = self._next_number
        self._next_number += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (head, tail, number)


def opening(name: str, /, **fields: Any) -> bytes:
    """An event without its number and its end."""
    return b"event: %b\ndata: %b" % (name.encode(), encode({"type": name, **fields})[:-1])
