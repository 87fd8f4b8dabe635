"""OpenAI chat completions: events become chunks or one object. Pure, no I/O. Its body is the chat form itself.

`logprobs` are the log-softmax of the model's raw logits: before penalties, temperature, filters and grammar. They come
with the chunk of their token; an end mark, which is no content, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

from backends.protocol.messages import TokenLogprob, Usage
from gateway.core.types import (
    ChoiceAnswer,
    Delta,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.dialects.base import AnswerContext, Dialect
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.openai_frames import Envelope, OpenAIRenderer, encode, error_body, usage_object


def _usage(usage: Usage) -> dict[str, Any]:
    """Numbers where each client looks: the standard place, and the flat name that Roo reads."""
    return usage_object(usage) | {"cache_read_input_tokens": usage.cached_tokens}


class Renderer(OpenAIRenderer):
    """One answer."""

    def __init__(self, context: AnswerContext) -> None:
        self._envelope = Envelope(f"chatcmpl-{context.request_id}", context, chunk_object="chat.completion.chunk")
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]' + self._envelope.tail

    def start(self, index: int) -> bytes:
        """The chunk that opens a choice: a role and no text."""
        return self._choice(index, {"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                return self._text(delta)
            case ReasoningDelta():
                return self._choice(delta.index, {"reasoning_content": delta.text})
            case ToolCallDelta():
                return self._choice(delta.index, {"tool_calls": [_call_delta(delta)]})
            case _:
                assert_never(delta)

    def _text(self, delta: TextDelta) -> bytes:
        if delta.logprobs:
            return self._choice(delta.index, {"content": delta.text}, logprobs=_logprobs_object(delta.logprobs))
        opening = b',"choices":[{"index":%d,"delta":{"content":' % delta.index
        return self._envelope.head + opening + encode(delta.text) + self._delta_tail

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes:
        return self._choice(index, {}, reason=reason.value)

    def finish(self, usage: Usage) -> bytes:
        return self._envelope.last_chunk(_usage(usage))

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        return self._envelope.whole("chat.completion", [_whole_choice(choice) for choice in choices], _usage(usage))

    def _choice(
        self, index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.chunk(choice)


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """The first one of a call says which it is, the others go on with its arguments."""
    function = {"arguments": delta.arguments}
    if not delta.name:
        return {"index": delta.call, "function": function}
    return {
        "index": delta.call,
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name} | function,
    }


def _whole_choice(choice: ChoiceAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
    logprobs = None if choice.logprobs is None else _logprobs_object(choice.logprobs)
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason.value}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs_object(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [_token(token) | {"top_logprobs": [_token(other) for other in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    data = None if token.bytes is None else list(token.bytes)
    return {"token": token.text, "logprob": token.logprob, "bytes": data}


DIALECT = Dialect("openai_chat", "/chat/completions", parse_chat, Renderer, error_body)
