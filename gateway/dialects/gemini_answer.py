"""What a GenerateContentResponse says, streamed or whole: its candidates, their parts, usage and ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.protocol.messages import Usage
from gateway.core.types import ChoiceAnswer, FinishReason
from gateway.dialects.base import AnswerContext
from gateway.dialects.object_arguments import input_value, is_object

EMPTY_TEXT = {"text": ""}  # of a candidate with nothing more to say: clients read the first part
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class GenerateContext:
    """What the renderer must know of the request: names to restore, and whether thoughts were asked for."""

    tool_names: Mapping[str, str] = field(default_factory=dict)
    include_thoughts: bool = False


def encode(value: Any) -> bytes:
    """In one line by anybody's count: Google's clients stop reading a frame at a line separator of Unicode's."""
    data = _encode(value)
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


class Envelope:
    """One answer's id and model, and the names to restore in it."""

    def __init__(self, context: AnswerContext) -> None:
        self._request_id = context.request_id
        self._head = {"modelVersion": context.model, "responseId": context.request_id}
        said = context.chat_context if isinstance(context.chat_context, GenerateContext) else GenerateContext()
        self.include_thoughts = said.include_thoughts
        self._tool_names = said.tool_names

    def response(self, candidates: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        return {"candidates": candidates, **self._head, **({"usageMetadata": usage} if usage is not None else {})}

    def call(self, index: int, number: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        """A whole call. An upstream may leave out its id; with one a client can tell apart two calls of a function."""
        shown = call_id or f"call_{self._request_id}_{index}_{number}"
        function = {"id": shown, "name": self._tool_names.get(name, name), "args": input_value(arguments)}
        return {"functionCall": function}

    def whole(self, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
        num_thoughts = sum(choice.num_reasoning_tokens for choice in choices)
        return encode(self.response(list(map(self._candidate, choices)), usage_metadata(usage, num_thoughts)))

    def _candidate(self, choice: ChoiceAnswer) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        if choice.reasoning and self.include_thoughts:
            parts.append({"text": choice.reasoning, "thought": True})
        if choice.text:
            parts.append({"text": choice.text})
        calls, cut = list(choice.calls), None
        if calls and is_cut(choice.reason, choice.stop_reason, calls[-1].arguments):
            cut = calls.pop().name
        for number, call in enumerate(calls):
            parts.append(self.call(choice.index, number, call.call_id, call.name, call.arguments))
        return candidate(choice.index, parts or [EMPTY_TEXT], self.end(choice.reason, choice.stop_reason, cut))

    def end(self, reason: FinishReason, stop_reason: str | int | None, cut: str | None) -> dict[str, str]:
        """`cut` names the function of a call that was left out. One with whole calls ends like any other, by STOP."""
        assert reason not in (FinishReason.ABORT, FinishReason.ERROR), "a broken answer ends by an error"
        if cut is None:
            return {"finishReason": "MAX_TOKENS" if reason is FinishReason.LENGTH else "STOP"}
        by_limit = reason is FinishReason.LENGTH
        why = "the token limit" if by_limit else "a stop sequence"
        said = f"A call of {self._tool_names.get(cut, cut)!r} was cut by {why} and is left out."
        return {"finishReason": "MAX_TOKENS" if by_limit else "MALFORMED_FUNCTION_CALL", "finishMessage": said}


def candidate(index: int, parts: list[dict[str, Any]], end: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"content": {"parts": parts, "role": "model"}, **(end or {}), "index": index}


def is_cut(reason: FinishReason, stop_reason: str | int | None, arguments: str) -> bool:
    """Whether the last call of an answer is only the beginning of one, which nobody should run."""
    return (reason is FinishReason.LENGTH or isinstance(stop_reason, str)) and not is_object(arguments)


def usage_metadata(usage: Usage, num_thoughts: int) -> dict[str, int]:
    """The prompt counts whole, with what was found in the cache; thoughts are counted beside the answer."""
    thoughts = min(num_thoughts, usage.completion_tokens)
    counted = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - thoughts,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
    }
    return counted | ({"thoughtsTokenCount": thoughts} if thoughts else {})
