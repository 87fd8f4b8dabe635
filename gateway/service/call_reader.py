"""Reads forced tool calls out of an answer's text while it is written. Pure.

The text is what a `tool_calls` grammar allows: `{"name":"f","arguments":{...}}`, or an array of such objects, without
any space between. Text that breaks off in the middle gives the part that is there.
"""

from __future__ import annotations

import hashlib
import re

from gateway.core.types import ToolCallDelta

_OPENING = re.compile(r'\{"name":"([^"]*)","arguments":$')


class CallReader:
    """One choice. What it gives out doesn't depend on how the text was cut, joined again."""

    def __init__(self, request_id: str, index: int) -> None:
        self._request_id = request_id
        self._index = index
        self._num_calls = 0
        self._head = ""  # what is read between the arguments of two calls
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._in_arguments = False

    @property
    def num_complete(self) -> int:
        return self._num_calls - self._in_arguments

    def push(self, text: str) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        start = 0
        for position, character in enumerate(text):
            if not self._in_arguments:
                self._head += character
                start = position + 1
                if character == ":" and (opening := _OPENING.search(self._head)):
                    self._in_arguments = True
                    self._num_calls += 1
                    deltas.append(self._delta(name=opening.group(1)))
            elif self._ends_arguments(character):
                deltas.append(self._delta(arguments=text[start : position + 1]))
                start = position + 1
                self._in_arguments, self._head = False, ""
        if self._in_arguments and start < len(text):
            deltas.append(self._delta(arguments=text[start:]))
        return deltas

    def _ends_arguments(self, character: str) -> bool:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0

    def _delta(self, *, name: str = "", arguments: str = "") -> ToolCallDelta:
        call = self._num_calls - 1
        return ToolCallDelta(self._index, call, call_id(self._request_id, self._index, call), name, arguments)


def call_id(request_id: str, index: int, call: int) -> str:
    """The same for the same call of the same answer, streamed or not."""
    digest = hashlib.blake2b(f"{request_id}:{index}:{call}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"
