"""Tool calls of an OpenAI-compatible server, put in order: one after another, each with an id of its own. Pure.

Real servers send the second call under the index of the first, ids that are empty, late or used twice, names again with
every piece, arguments as an object, and pieces of several calls in turn. What comes out has calls numbered from 0 that
never interleave; a call waits until those before it are complete.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.core.types import ToolCallDelta


@dataclass(slots=True)
class _Call:
    said_id: str = ""  # by the upstream, at any time
    own_id: str = ""  # that the client sees, from the first piece on
    name: str = ""
    parts: list[str] = field(default_factory=list)  # of the arguments
    num_given: int = 0  # parts that are out already
    begun: bool = False
    whole_at: int = -1  # number of parts for which `is_whole` was answered last, and what it was
    whole: bool = False

    def is_whole(self) -> bool:
        """Whether the arguments are a complete JSON object. Asked only when another call follows."""
        if not self.parts or not self.parts[-1].rstrip().endswith("}"):
            return False
        if self.whole_at != len(self.parts):
            self.whole_at, self.whole = len(self.parts), _is_object("".join(self.parts))
        return self.whole


class CallOrder:
    """The calls of one choice."""

    def __init__(self, request_id: str, index: int) -> None:
        self._request_id = request_id
        self._index = index
        self._calls: list[_Call] = []
        self._by_slot: dict[int, _Call] = {}  # the upstream's index -> its latest call
        self._ids: set[str] = set()
        self._given = 0  # calls that are out completely

    @property
    def seen(self) -> bool:
        """Whether there is any call that has a name."""
        return any(call.name for call in self._calls)

    def push(self, piece: Any) -> list[ToolCallDelta]:
        """One entry of `tool_calls`, as it came."""
        if not isinstance(piece, dict):
            return []
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        name, said_id = _text(function.get("name")), _text(piece.get("id"))
        arguments = _arguments(function.get("arguments"))
        call = self._call_of(piece.get("index"), name, said_id, has_arguments=bool(arguments))
        call.name = call.name or name
        call.said_id = call.said_id or said_id
        if arguments:
            call.parts.append(arguments)
        return self._ready(is_end=False)

    def finish(self) -> list[ToolCallDelta]:
        """What still waited for calls before it. A call that never got a name is none."""
        return self._ready(is_end=True)

    def _call_of(self, slot: Any, name: str, said_id: str, *, has_arguments: bool) -> _Call:
        if not isinstance(slot, int) or isinstance(slot, bool):
            slot = self._slot_without_index(name, said_id)
        call = self._by_slot.get(slot)
        if call is None or _is_another(call, name, said_id, has_arguments=has_arguments):
            call = self._by_slot[slot] = _Call()
            self._calls.append(call)
        return call

    def _slot_without_index(self, name: str, said_id: str) -> int:
        """Of the call with this id; else of a new one if it is named; else of the latest."""
        for slot, call in self._by_slot.items():
            if said_id and call.said_id == said_id:
                return slot
        latest = max(self._by_slot, default=-1)
        return latest + 1 if name or latest < 0 else latest

    def _ready(self, *, is_end: bool) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        while self._given < len(self._calls):
            call = self._calls[self._given]
            if not call.name:
                if not is_end:
                    break
                del self._calls[self._given]
                continue
            deltas += self._pieces(call)
            is_last = self._given == len(self._calls) - 1
            if not is_end and (is_last or not call.is_whole()):
                break
            self._given += 1
        return deltas

    def _pieces(self, call: _Call) -> list[ToolCallDelta]:
        new = "".join(call.parts[call.num_given :])
        call.num_given = len(call.parts)
        if call.begun:
            return [self._delta("", new)] if new else []
        call.begun = True
        call.own_id = self._own_id(call.said_id)
        return [self._delta(call.name, new)]

    def _delta(self, name: str, arguments: str) -> ToolCallDelta:
        call_id = self._calls[self._given].own_id
        return ToolCallDelta(self._index, self._given, call_id, name, arguments)

    def _own_id(self, said_id: str) -> str:
        """The upstream's id, unless it has none or said it before."""
        if not said_id or said_id in self._ids:
            text = f"{self._request_id}:{self._index}:{self._given}"
            said_id = f"call_{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
        self._ids.add(said_id)
        return said_id


def _is_another(call: _Call, name: str, said_id: str, *, has_arguments: bool) -> bool:
    """Whether a piece under a call's index begins the next call: only one that says a name can.

    Some servers say id and name again with every piece, others the same id for every call.
    """
    if not name or not call.name:
        return False
    if name != call.name or (said_id and call.said_id and said_id != call.said_id):
        return True
    return call.is_whole() and (has_arguments or not said_id)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(value: Any) -> str:
    """Always a string, as the API has it; some servers send what the string should hold."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def _is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
