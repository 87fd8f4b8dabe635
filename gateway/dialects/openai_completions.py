"""OpenAI text completions: a body becomes a `ParsedBody`, events become chunks or one object. Pure, no I/O.

`logprobs` are the log-softmax of the model's raw logits: before penalties, temperature, filters and grammar. With
`echo` the prompt's tokens have theirs too, the first one none; for that the whole prompt is computed, so
`cached_tokens` is 0. `max_tokens` may be 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends.protocol.messages import Prompt, TextPrompt, TokenLogprob, TokenPrompt, Usage
from gateway.core.types import ChoiceAnswer, Delta, FinishReason, ReasoningDelta, TextDelta
from gateway.dialects.base import AnswerContext, Dialect
from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.grammar import grammar_notices, read_response_format
from gateway.dialects.openai_frames import Envelope, OpenAIRenderer, encode, error_body, usage_object
from gateway.dialects.sampling import (
    NO_EFFECT,
    Defaults,
    ParsedBody,
    check_token_ids,
    read_cache_salt,
    read_include_usage,
    read_n,
    read_sampling,
    unknown_field_notices,
)

DEFAULT_MAX_TOKENS = 16  # of this API, since its first version
MAX_LOGPROBS = 5


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """Check every field by name. Raises `InvalidRequest`."""
    fields = Fields(body)
    fields.accept(NO_EFFECT)
    prompt = _prompt(fields.get("prompt"))
    _refuse_what_is_not_built(fields)
    echo = fields.boolean("echo")
    max_tokens, notices = _max_tokens(fields, defaults, echo=echo)
    logprobs = _logprobs(fields)
    sampling = msgspec.structs.replace(
        read_sampling(fields, max_tokens, defaults),
        n=read_n(fields),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        echo=echo,
        grammar=read_response_format(fields),
    )
    include_usage, cache_salt = read_include_usage(fields), read_cache_salt(fields)
    notices += grammar_notices(sampling) + unknown_field_notices(fields)
    return ParsedBody(prompt, sampling, include_usage, cache_salt, notices)


def _logprobs(fields: Fields) -> int | None:
    return None if fields.get("logprobs") is False else fields.integer("logprobs", 0, MAX_LOGPROBS)


def _max_tokens(fields: Fields, defaults: Defaults, *, echo: bool) -> tuple[int, tuple[str, ...]]:
    said = fields.integer("max_tokens", 0)
    if said == 0 and not echo:
        refuse("`max_tokens` must be at least 1, or 0 with `echo`; it is 0.", "max_tokens")
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
    fields.unsupported("prompt_logprobs", 0)
    fields.unsupported("suffix", "")


class Renderer(OpenAIRenderer):
    """One answer. This API has no opening chunk, no tools, and no place for reasoning but the text itself."""

    def __init__(self, context: AnswerContext) -> None:
        self._envelope = Envelope(f"cmpl-{context.request_id}", context, chunk_object="text_completion")
        self._text_tail = b',"logprobs":null,"finish_reason":null}]' + self._envelope.tail

    def start(self, index: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        assert isinstance(delta, TextDelta | ReasoningDelta), "this API has no tools"
        if isinstance(delta, TextDelta) and delta.logprobs:
            return self._choice(delta.index, delta.text, logprobs=_logprobs_object(delta.logprobs))
        return (
            self._envelope.head
            + b',"choices":[{"index":%d,"text":' % delta.index
            + encode(delta.text)
            + self._text_tail
        )

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes:
        return self._choice(index, "", reason=reason.value)

    def finish(self, usage: Usage) -> bytes:
        return self._envelope.last_chunk(usage_object(usage))

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        return self._envelope.whole(
            "text_completion", [_whole_choice(choice) for choice in choices], usage_object(usage)
        )

    def _choice(
        self, index: int, text: str, *, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.chunk(choice)


def _whole_choice(choice: ChoiceAnswer) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else _logprobs_object(choice.logprobs)
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.reason.value}


def _logprobs_object(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`text_offset` counts characters of the choice's whole text, an echo included."""
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [_top(token) for token in logprobs],
        "text_offset": [token.offset for token in logprobs],
    }


def _top(token: TokenLogprob) -> dict[str, float | None] | None:
    """The likeliest tokens, and this one. Of several that read the same, such as parts of characters, the likeliest."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for other in (*token.top, token):
        found.setdefault(other.text, other.logprob)
    return found


DIALECT = Dialect("openai_completions", "/completions", parse, Renderer, error_body)
