"""Events of one answer as the stream of the Gemini API: frames of one JSON object each, or one array of them. Pure.

Google's own clients read frames by a pattern that knows no comments and no event names, and skips nothing but blank
space; an error stands in the stream without `data:`. The last frame says why each candidate ended, and the usage:
Gemini CLI looks for both in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from typing_extensions import override

from backends.protocol.messages import Usage
from gateway.core.types import ChoiceAnswer, Delta, FinishReason, ReasoningDelta, Started, TextDelta, ToolCallDelta
from gateway.dialects.base import AnswerContext, ErrorFacts
from gateway.dialects.gemini_answer import EMPTY_TEXT, Envelope, candidate, encode, is_cut, usage_metadata
from gateway.dialects.gemini_errors import error_object

BLANK = b"\n"  # between frames it is nothing to any parser, and a sign of life to whoever counts bytes


@dataclass(slots=True)
class _Call:
    """A call that is still being written: clients get whole calls only."""

    index: int
    number: int
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class GenerateRenderer:
    """One answer, as events of a stream or in one piece."""

    def __init__(self, context: AnswerContext) -> None:
        self._envelope = Envelope(context)
        self._calls: dict[int, _Call] = {}  # by choice
        self._ended: list[dict[str, Any]] = []  # candidates, for the last frame
        self._num_thoughts = 0

    def begin(self, started: Started | None) -> bytes:
        return b""

    def start(self, index: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                return self._part(delta.index, {"text": delta.text}) if delta.text else b""
            case ReasoningDelta():
                self._num_thoughts += delta.num_tokens
                wanted = delta.text and self._envelope.include_thoughts
                return self._part(delta.index, {"text": delta.text, "thought": True}) if wanted else b""
            case ToolCallDelta():
                return self._tool_call(delta)
            case _:
                assert_never(delta)

    def _tool_call(self, delta: ToolCallDelta) -> bytes:
        frames = b""
        if delta.name:
            frames = self._end_call(delta.index)
            self._calls[delta.index] = _Call(delta.index, delta.call, delta.call_id, delta.name)
        if (call := self._calls.get(delta.index)) is not None:
            call.parts.append(delta.arguments)
        return frames

    def _end_call(self, index: int) -> bytes:
        call = self._calls.pop(index, None)
        if call is None:
            return b""
        return self._part(index, self._envelope.call(index, call.number, call.call_id, call.name, call.arguments))

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes:
        call, cut = self._calls.get(index), None
        if call is not None and is_cut(reason, stop_reason, call.arguments):
            cut = self._calls.pop(index).name
        frames = self._end_call(index)
        self._ended.append(candidate(index, [EMPTY_TEXT], self._envelope.end(reason, stop_reason, cut)))
        return frames

    def finish(self, usage: Usage) -> bytes:
        return self._frame(self._envelope.response(self._ended, usage_metadata(usage, self._num_thoughts)))

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        return self._envelope.whole(list(choices), usage)

    def conversation(self) -> None:
        """The client sends the whole conversation each time."""

    def heartbeat(self) -> bytes:
        return BLANK

    def error(self, facts: ErrorFacts) -> bytes:
        return encode(error_object(facts)) + b"\n\n"

    def _part(self, index: int, part: dict[str, Any]) -> bytes:
        return self._frame(self._envelope.response([candidate(index, [part])]))

    def _frame(self, response: dict[str, Any]) -> bytes:
        return b"data: " + encode(response) + b"\n\n"


class ArrayRenderer(GenerateRenderer):
    """The same as one JSON array, for a client that didn't ask for an event stream."""

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._begun = False

    @override
    def finish(self, usage: Usage) -> bytes:
        return super().finish(usage) + b"]"

    @override
    def error(self, facts: ErrorFacts) -> bytes:
        """The last element: whoever reads the array as a whole finds it there."""
        return self._frame(error_object(facts)) + b"]"

    @override
    def _frame(self, response: dict[str, Any]) -> bytes:
        opening = b",\n" if self._begun else b"["
        self._begun = True
        return opening + encode(response)
