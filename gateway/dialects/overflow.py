"""Whether an error says that a prompt is too long, in whichever words, and the numbers in it. Pure.

Clients shorten a conversation by the wording of their own API, which each dialect makes of this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.core.too_long import says_too_long
from gateway.dialects.base import ErrorFacts

_LIMIT = re.compile(r"(?:maximum context length (?:is|of)|context (?:size|length|window)(?: is| of| \()*)\D{0,3}(\d+)")
# In this order: "your prompt has N tokens" (ours), "you requested N tokens" (OpenAI), "request (N tokens)" (llama.cpp).
_ASKED = tuple(
    re.compile(before + r"(\d+) tokens") for before in ("has (?:at least )?", "requested (?:about )?", r"\(")
)


@dataclass(frozen=True, slots=True)
class Wording:
    """How one API says it, which is what its clients look for."""

    known: re.Pattern[str]  # a message that says it in these words already
    lead: str
    sentence: str  # of {num_tokens} and {maximum}


@dataclass(frozen=True, slots=True)
class _Overflow:
    """How many tokens the prompt has and how many there may be."""

    num_tokens: int
    maximum: int


def worded(facts: ErrorFacts, wording: Wording) -> str:
    """The error's message; an overflow begins with the words of that API, whoever found it."""
    if not _is_overflow(facts) or wording.known.search(facts.message):
        return facts.message
    overflow = _read_overflow(facts.message)
    if overflow is None:
        return f"{wording.lead}: {facts.message}"
    sentence = wording.sentence.format(num_tokens=overflow.num_tokens, maximum=overflow.maximum)
    return f"{sentence.removesuffix('.')}. {facts.message}" if facts.code == "kv_pool_too_small" else sentence


def _is_overflow(facts: ErrorFacts) -> bool:
    if facts.code in ("context_length_exceeded", "kv_pool_too_small"):
        return True
    return facts.status in (400, 413, 422) and facts.param is None and says_too_long(facts.message)


def _read_overflow(message: str) -> _Overflow | None:
    """None where it doesn't say both. One place is for the answer: a prompt may be too long by none."""
    limit = _LIMIT.search(message)
    asked = next((found for pattern in _ASKED if (found := pattern.search(message))), None)
    if limit is None or asked is None:
        return None
    num_tokens, maximum = int(asked[1]), int(limit[1])
    return _Overflow(num_tokens, min(maximum, num_tokens - 1))
