"""OpenAI chat completions: a body becomes a `ParsedBody`, events become chunks or one object. Pure, no I/O.

`logprobs` are the log-softmax of the model's raw logits: before penalties, temperature, filters and grammar. They come
with the chunk of their token; an end mark, which is no content, has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends.protocol.messages import ChatPrompt, TokenLogprob, Usage
from gateway.core.types import ChoiceAnswer, FinishReason, TextDelta, ToolCall, ToolCallDelta
from gateway.dialects.chat_messages import read_messages, read_tools
from gateway.dialects.fields import Fields, refuse
from gateway.dialects.grammar import grammar_notices, read_response_format, read_tool_choice
from gateway.dialects.openai_frames import Envelope, encode, usage_object
from gateway.dialects.sampling import (
    NO_EFFECT,
    Defaults,
    ParsedBody,
    read_cache_salt,
    read_include_usage,
    read_n,
    read_sampling,
    unknown_field_notices,
)

NAME = "openai_chat"
PATH = "/chat/completions"
MAX_TOP_LOGPROBS = 20


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """Check every field by name. Raises `InvalidRequest`."""
    fields = Fields(body)
    fields.accept(NO_EFFECT)
    messages = read_messages(fields.get("messages"))
    use = read_tool_choice(fields, read_tools(fields.get("tools")))
    response_format = read_response_format(fields)
    _refuse_what_is_not_built(fields)
    sampling = msgspec.structs.replace(
        read_sampling(fields, _max_tokens(fields, defaults), defaults),
        n=read_n(fields),
        logprobs=_logprobs(fields),
        grammar=use.grammar or response_format,
    )
    include_usage, cache_salt = read_include_usage(fields), read_cache_salt(fields)
    prompt = ChatPrompt(
        messages=messages,
        tools=use.tools,
        template_kwargs=fields.mapping("chat_template_kwargs") or {},
        continue_final_message=fields.boolean("continue_final_message"),
        forced_calls=use.forced_calls,
    )
    notices = grammar_notices(sampling)
    if use.grammar is not None and response_format is not None:
        notices += ("response_format has no effect: a tool call is forced",)
    return ParsedBody(prompt, sampling, include_usage, cache_salt, notices + unknown_field_notices(fields))


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not wanted and top:
        refuse("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    return (top or 0) if wanted else None


def _max_tokens(fields: Fields, defaults: Defaults) -> int | None:
    """`max_completion_tokens` is the newer name and wins; both are checked."""
    newer, older = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    return next((value for value in (newer, older, defaults.max_tokens) if value is not None), None)


def _refuse_what_is_not_built(fields: Fields) -> None:
    fields.unsupported("prompt_logprobs", 0)
    fields.unsupported("echo", False)
    fields.unsupported("suffix", "")
    fields.unsupported("functions", [])
    fields.unsupported("function_call", "none", "auto")
    fields.unsupported("modalities", ["text"])
    fields.unsupported("audio")


def _usage(usage: Usage) -> dict[str, Any]:
    """Numbers where each client looks: the standard place, and the flat name that Roo reads."""
    return usage_object(usage) | {"cache_read_input_tokens": usage.cached_tokens}


class Renderer:
    """One answer."""

    def __init__(self, request_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._envelope = Envelope(
            f"chatcmpl-{request_id}", created, model, chunk_object="chat.completion.chunk", include_usage=include_usage
        )
        self._delta_tail = b'},"logprobs":null,"finish_reason":null}]' + self._envelope.tail

    def start(self, index: int) -> bytes:
        """The chunk that opens a choice: a role and no text."""
        return self._choice(index, {"role": "assistant", "content": ""})

    def delta(self, delta: TextDelta | ToolCallDelta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            return self._choice(delta.index, {"tool_calls": [_call_delta(delta)]})
        if delta.logprobs:
            return self._choice(delta.index, {"content": delta.text}, logprobs=_logprobs_object(delta.logprobs))
        opening = b',"choices":[{"index":%d,"delta":{"content":' % delta.index
        return self._envelope.head + opening + encode(delta.text) + self._delta_tail

    def end(self, index: int, reason: FinishReason) -> bytes:
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
    if choice.calls:
        message |= {"content": None, "tool_calls": [_call(call) for call in choice.calls]}
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
