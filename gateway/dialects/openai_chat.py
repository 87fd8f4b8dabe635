"""OpenAI chat completions: a body becomes a `ParsedBody`, events become chunks or one object. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.protocol.messages import ChatPrompt, Usage
from gateway.core.types import FinishReason
from gateway.dialects.chat_messages import read_messages, read_tools
from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.sampling import (
    NO_EFFECT,
    Defaults,
    ParsedBody,
    read_include_usage,
    read_one_choice,
    read_response_format,
    read_sampling,
    unknown_field_notices,
)

NAME = "openai_chat"
PATH = "/chat/completions"

_encode = msgspec.json.Encoder().encode


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """Check every field by name. Raises `InvalidRequest`."""
    fields = Fields(body)
    fields.accept(NO_EFFECT)
    messages = read_messages(fields.get("messages"))
    tools = read_tools(fields.get("tools"))
    tools = _apply_tool_choice(fields, tools)
    _refuse_what_is_not_built(fields)
    sampling = read_sampling(fields, _max_tokens(fields, defaults), defaults)
    include_usage = read_include_usage(fields)
    prompt = ChatPrompt(
        messages=messages,
        tools=tools,
        template_kwargs=fields.mapping("chat_template_kwargs") or {},
        continue_final_message=fields.boolean("continue_final_message"),
    )
    return ParsedBody(prompt, sampling, include_usage, unknown_field_notices(fields))


def _max_tokens(fields: Fields, defaults: Defaults) -> int | None:
    """`max_completion_tokens` is the newer name and wins; both are checked."""
    newer, older = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    return next((value for value in (newer, older, defaults.max_tokens) if value is not None), None)


def _apply_tool_choice(fields: Fields, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    choice = fields.get("tool_choice")
    if choice == "required" or isinstance(choice, dict):
        said = "'required'" if choice == "required" else "naming a function"
        refuse(f"`tool_choice` {said} is not supported by the local engine; 'auto' and 'none' are.", "tool_choice")
    if choice not in (None, "auto", "none"):
        refuse(f"`tool_choice` must be 'none' or 'auto', not {kind(choice)}.", "tool_choice")
    return None if choice == "none" else tools


def _refuse_what_is_not_built(fields: Fields) -> None:
    read_one_choice(fields)
    read_response_format(fields)
    fields.unsupported("logprobs", False)
    fields.unsupported("top_logprobs", 0)
    fields.unsupported("prompt_logprobs", 0)
    fields.unsupported("echo", False)
    fields.unsupported("suffix", "")
    fields.unsupported("functions", [])
    fields.unsupported("function_call", "none", "auto")
    fields.unsupported("modalities", ["text"])
    fields.unsupported("audio")


def usage_object(usage: Usage) -> dict[str, Any]:
    """Numbers where each client looks: the standard place, and the flat name that Roo reads."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "cache_read_input_tokens": usage.cached_tokens,
    }


class Renderer:
    """One answer. Everything that is the same in each chunk is encoded once."""

    def __init__(self, request_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = created
        self._model = model
        self._include_usage = include_usage
        head = {"id": self._id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._delta_head = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def start(self) -> bytes:
        """The chunk that opens the answer: a role and no text."""
        delta = (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        )
        return self._head + delta + self._tail

    def text(self, text: str) -> bytes:
        return self._delta_head + _encode(text) + self._delta_tail

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        """The last chunks, without `[DONE]`."""
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason.value}
        frames = self._head + b',"choices":[' + _encode(choice) + b"]" + self._tail
        if self._include_usage:
            frames += self._head + b',"choices":[],"usage":' + _encode(usage_object(usage)) + b"}\n\n"
        return frames

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """The answer of a request that didn't ask for a stream."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason.value}
        return _encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [choice],
                "usage": usage_object(usage),
            }
        )
