"""What a Message says, streamed or whole: its envelope, usage, blocks and the reason why it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.protocol.messages import Usage
from gateway.core.types import ChoiceAnswer, FinishReason
from gateway.dialects.base import AnswerContext
from gateway.dialects.object_arguments import input_value

encode = msgspec.json.Encoder().encode

EMPTY_TEXT = {"type": "text", "text": ""}  # of an answer without anything: clients read the first block


@dataclass(frozen=True, slots=True)
class MessagesContext:
    """What the renderer must know of the translation: function names as sent -> as the client wrote them."""

    tool_names: Mapping[str, str] = field(default_factory=dict)


class Envelope:
    """One answer's id and model, and the names to restore in it."""

    def __init__(self, context: AnswerContext) -> None:
        self._id = f"msg_{context.request_id}"
        self._request_id = context.request_id
        self._model = context.model
        translated = context.chat_context
        self._tool_names = translated.tool_names if isinstance(translated, MessagesContext) else {}

    def message(
        self, content: list[dict[str, Any]], usage: dict[str, int], stop: dict[str, str | None] | None = None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **(stop or {"stop_reason": None, "stop_sequence": None}),
            "usage": usage,
        }

    def tool_use(self, call_id: str, number: int, name: str) -> dict[str, Any]:
        """The opening of a call. An upstream may leave out its id; the client needs one to answer."""
        shown = call_id or f"toolu_{self._request_id}_{number}"
        return {"type": "tool_use", "id": shown, "name": self._tool_names.get(name, name)}

    def whole(self, choice: ChoiceAnswer, usage: Usage) -> bytes:
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        for number, call in enumerate(choice.calls):
            content.append(self.tool_use(call.call_id, number, call.name) | {"input": input_value(call.arguments)})
        stop = stop_fields(choice.reason, choice.stop_reason, has_calls=bool(choice.calls))
        return encode(self.message(content or [EMPTY_TEXT], usage_object(usage), stop))


def usage_object(usage: Usage) -> dict[str, int]:
    """`input_tokens` leaves out what was found in the cache. No write to a cache is ever charged here."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_fields(reason: FinishReason, stop_reason: str | int | None, *, has_calls: bool) -> dict[str, str | None]:
    """`tool_use` is only said of an answer with calls. One that a stop sequence cut is not ready to be run."""
    assert reason not in (FinishReason.ABORT, FinishReason.ERROR), "a broken answer ends by an error"
    said, sequence = "end_turn", None
    if reason is FinishReason.LENGTH:
        said = "max_tokens"
    elif isinstance(stop_reason, str):
        said, sequence = "stop_sequence", stop_reason
    elif has_calls:
        said = "tool_use"
    return {"stop_reason": said, "stop_sequence": sequence}
