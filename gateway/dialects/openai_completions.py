"""OpenAI text completions: a body becomes a `ParsedBody`, events become chunks or one object. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.protocol.messages import Prompt, TextPrompt, TokenPrompt, Usage
from gateway.core.types import FinishReason
from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.sampling import (
    NO_EFFECT,
    Defaults,
    ParsedBody,
    check_token_ids,
    read_include_usage,
    read_one_choice,
    read_response_format,
    read_sampling,
    unknown_field_notices,
)

NAME = "openai_completions"
PATH = "/completions"
DEFAULT_MAX_TOKENS = 16  # of this API, since its first version

_encode = msgspec.json.Encoder().encode


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """Check every field by name. Raises `InvalidRequest`."""
    fields = Fields(body)
    fields.accept(NO_EFFECT)
    prompt = _prompt(fields.get("prompt"))
    _refuse_what_is_not_built(fields)
    max_tokens, notices = _max_tokens(fields, defaults)
    sampling = read_sampling(fields, max_tokens, defaults)
    include_usage = read_include_usage(fields)
    return ParsedBody(prompt, sampling, include_usage, notices + unknown_field_notices(fields))


def _max_tokens(fields: Fields, defaults: Defaults) -> tuple[int, tuple[str, ...]]:
    said = fields.integer("max_tokens", 1)
    if said is not None:
        return said, ()
    if defaults.max_tokens is not None:
        return defaults.max_tokens, ()
    return DEFAULT_MAX_TOKENS, (f"max_tokens was not given: {DEFAULT_MAX_TOKENS}, the default of this API",)


def _prompt(value: object) -> Prompt:
    if value is None:
        refuse("`prompt` is required: a string or an array of token ids.", "prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list):
        if len(value) > 1 and isinstance(value[0], str | list):
            refuse(f"`prompt` holds {len(value)} prompts; one per request is supported by the local engine.", "prompt")
        token_ids = check_token_ids(value, "prompt")
        return TokenPrompt(token_ids=token_ids) if token_ids else refuse("`prompt` is empty.", "prompt")
    if not isinstance(value, str):
        refuse(f"`prompt` must be a string or an array of token ids, not {kind(value)}.", "prompt")
    return TextPrompt(text=value) if value else refuse("`prompt` is empty.", "prompt")


def _refuse_what_is_not_built(fields: Fields) -> None:
    read_one_choice(fields)
    read_response_format(fields)
    fields.unsupported("logprobs", False)
    fields.unsupported("prompt_logprobs", 0)
    fields.unsupported("echo", False)
    fields.unsupported("suffix", "")


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Renderer:
    """One answer. Everything that is the same in each chunk is encoded once."""

    def __init__(self, request_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = created
        self._model = model
        self._include_usage = include_usage
        head = {"id": self._id, "object": "text_completion", "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._text_head = self._head + b',"choices":[{"index":0,"text":'
        self._text_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def start(self) -> bytes:
        """This API has no opening chunk."""
        return b""

    def text(self, text: str) -> bytes:
        return self._text_head + _encode(text) + self._text_tail

    def finish(self, reason: FinishReason, usage: Usage) -> bytes:
        """The last chunks, without `[DONE]`."""
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": reason.value}
        frames = self._head + b',"choices":[' + _encode(choice) + b"]" + self._tail
        if self._include_usage:
            frames += self._head + b',"choices":[],"usage":' + _encode(usage_object(usage)) + b"}\n\n"
        return frames

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """The answer of a request that didn't ask for a stream."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason.value}
        return _encode(
            {
                "id": self._id,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [choice],
                "usage": usage_object(usage),
            }
        )
