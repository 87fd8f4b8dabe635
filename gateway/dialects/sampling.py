"""The sampling fields that the OpenAI dialects share, read into `SamplingParams`. Knows no message format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.protocol.messages import Prompt, SamplingParams
from gateway.core.errors import InvalidRequest
from gateway.dialects.fields import Fields, kind, refuse

# Accepted so that clients work, and without effect on a local engine.
NO_EFFECT = (
    "model", "stream", "user", "metadata", "store", "service_tier", "reasoning_effort",
    "reasoning", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity", "prediction",
    "include_reasoning", "thinking", "request_id", "priority", "session_id",
)  # fmt: skip


MAX_CHOICES = 8


@dataclass(frozen=True, slots=True)
class Defaults:
    """What fills in for a field that a request leaves out, and the limits of lists."""

    temperature: float | None = None
    model_sampling: Mapping[str, float] = field(default_factory=dict)  # what the model's authors advise
    max_tokens: int | None = None
    max_stop_strings: int = 16


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What a dialect makes of a request's body."""

    prompt: Prompt
    sampling: SamplingParams
    include_usage: bool
    cache_salt: str = ""
    notices: tuple[str, ...] = ()
    context: Any = None  # of a dialect other than chat, for its renderer: `ChatForm.context`


def read_sampling(fields: Fields, max_tokens: int | None, defaults: Defaults) -> SamplingParams:
    """Every sampling field, checked. `max_tokens` was read by the dialect, which knows its name."""
    neutral = SamplingParams()
    chosen = _first_or_none(fields.number("temperature", 0, 2), defaults.temperature)
    # The advised values belong together: whoever chooses a temperature chooses the rest too.
    advised = (defaults.model_sampling if chosen is None else {}).get
    temperature = _first(chosen, advised("temperature"), neutral.temperature)
    top_k = _first(fields.integer("top_k", -1, 2**31 - 1), advised("top_k"), neutral.top_k)
    min_tokens = _first(fields.integer("min_tokens", 0), 0)
    if max_tokens is not None and min_tokens > max_tokens:
        refuse(f"`min_tokens` ({min_tokens}) must not be above the token limit ({max_tokens}).", "min_tokens")
    return SamplingParams(
        temperature=temperature,
        top_p=_first(fields.number("top_p", 0, 1, above=True), advised("top_p"), neutral.top_p),
        top_k=max(0, int(top_k)),  # -1 is another way to say off
        min_p=_first(fields.number("min_p", 0, 1), advised("min_p"), neutral.min_p),
        presence_penalty=_first(fields.number("presence_penalty", -2, 2), neutral.presence_penalty),
        frequency_penalty=_first(fields.number("frequency_penalty", -2, 2), neutral.frequency_penalty),
        repetition_penalty=_first(
            fields.number("repetition_penalty", 0, math.inf, above=True),
            advised("repetition_penalty"),
            neutral.repetition_penalty,
        ),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed"),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop(fields, defaults.max_stop_strings),
        stop_token_ids=_token_ids(fields, "stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos"),
    )


MAX_SALT_LENGTH = 256


def read_cache_salt(fields: Fields) -> str:
    """Requests with another salt share no prefix blocks with this one."""
    salt = fields.string("cache_salt")
    if salt is not None and not 0 < len(salt) <= MAX_SALT_LENGTH:
        refuse(f"`cache_salt` must have 1 to {MAX_SALT_LENGTH} characters; it has {len(salt)}.", "cache_salt")
    return salt or ""


def read_include_usage(fields: Fields) -> bool:
    options = fields.mapping("stream_options") or {}
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        refuse(f"`stream_options.include_usage` must be true or false, not {kind(value)}.", "stream_options")
    return bool(value)


def read_n(fields: Fields) -> int:
    """How many choices. `best_of` is accepted where it says the same."""
    n = fields.integer("n", 1)
    if n is not None and n > MAX_CHOICES:
        refuse(f"`n` is {n}; at most {MAX_CHOICES} choices of one prompt are answered. Send more requests.", "n")
    best_of = fields.integer("best_of", 1)
    if best_of not in (None, n or 1):
        refuse(f"`best_of` is {best_of}: choosing among answers is not supported; it must equal `n`.", "best_of")
    return n or 1


def unknown_field_notices(fields: Fields) -> tuple[str, ...]:
    names = [name for name in fields.unknown() if name.isprintable() and len(name) <= 64]
    if not names:
        return ()
    shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
    return (f"unknown fields have no effect: {shown}",)


def _first_or_none(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.mapping("logit_bias") or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            refuse(f"`logit_bias` keys must be token ids; {key[:40]!r} is not.", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            refuse(f"`logit_bias[{key}]` must be a number from -100 to 100.", "logit_bias")
        bias[int(key)] = float(value)
    return bias


def _stop(fields: Fields, limit: int) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        refuse("`stop` must be a string or an array of strings.", "stop")
    if len(stops) > limit:
        refuse(f"`stop` has {len(stops)} strings; at most {limit} are allowed.", "stop")
    if "" in stops:
        refuse("`stop` must not hold an empty string.", "stop")
    return tuple(stops)


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    return tuple(check_token_ids(value, name))


def check_token_ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest(f"`{name}` must be an array of token ids, not {kind(value)}.", param=name)
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidRequest(f"`{name}` must hold token ids: integers that are not negative.", param=name)
    return value
