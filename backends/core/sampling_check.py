"""Which sampling parameters make sense. One table of ranges; refuses by the field's name, and never adjusts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from backends.core.errors import RequestRefused
from backends.protocol.messages import SamplingParams

MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 100.0
MAX_CHOICES = 8
MAX_LOGPROBS = 20
SCORING_CHUNK = 256


@dataclass(frozen=True, slots=True)
class _Range:
    field: str
    allowed: str
    holds: Callable[[float], bool]


_RANGES = (
    _Range("temperature", "from 0 to 2", lambda value: 0 <= value <= 2),
    _Range("top_p", "greater than 0 and at most 1", lambda value: 0 < value <= 1),
    _Range("top_k", "a whole number from 1, or 0 or -1 for off", lambda value: value >= -1),
    _Range("min_p", "from 0 to 1", lambda value: 0 <= value <= 1),
    _Range("presence_penalty", "from -2 to 2", lambda value: -2 <= value <= 2),
    _Range("frequency_penalty", "from -2 to 2", lambda value: -2 <= value <= 2),
    _Range("repetition_penalty", "greater than 0", lambda value: 0 < value < math.inf),
    _Range("max_tokens", "at least 1, or 0 with echo", lambda value: value >= 0),
    _Range("min_tokens", "at least 0", lambda value: value >= 0),
    _Range("n", f"from 1 to {MAX_CHOICES}", lambda value: 1 <= value <= MAX_CHOICES),
    _Range("logprobs", f"from 0 to {MAX_LOGPROBS}", lambda value: 0 <= value <= MAX_LOGPROBS),
    _Range("prompt_logprobs", f"from 0 to {MAX_LOGPROBS}", lambda value: 0 <= value <= MAX_LOGPROBS),
)


def scoring_chunk(asked: int | None) -> int:
    """Most prompt tokens in one step of a request that scores its prompt: each needs a row of logits."""
    return SCORING_CHUNK if asked is None else min(asked, SCORING_CHUNK)


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise `RequestRefused` that names the first field out of range and what it may be.

    NaN is out of every range, since no comparison with it holds.
    """
    for rule in _RANGES:
        value = getattr(params, rule.field)
        if value is not None and not rule.holds(value):
            _refuse(rule.field, f"{rule.field} is {value}; allowed: {rule.allowed}.")
    if params.max_tokens == 0 and not params.echo:
        _refuse("max_tokens", "max_tokens is 0; allowed: at least 1, or 0 with echo.")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        limit = f"allowed: at most max_tokens, {params.max_tokens}."
        _refuse("min_tokens", f"min_tokens is {params.min_tokens}; {limit}")
    _check_stop(params.stop)
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("logit_bias", params.logit_bias, vocab_size)
    _check_biases(params.logit_bias)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"stop has {len(stop)} strings; allowed: at most {MAX_STOP_STRINGS}.")
    if "" in stop:
        _refuse("stop", "stop holds an empty string; allowed: strings of at least one character.")


def _check_token_ids(field: str, token_ids: tuple[int, ...] | dict[int, float], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            _refuse(field, f"{field} names token {token_id}; allowed: token ids from 0 to {vocab_size - 1}.")


def _check_biases(biases: dict[int, float]) -> None:
    for token_id, bias in biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"logit_bias of token {token_id} is {bias}; allowed: from -100 to 100.")


def _refuse(field: str, message: str) -> NoReturn:
    raise RequestRefused("invalid_request", message, field)
