"""Whether an error says that a prompt is too long, in whichever words, and the numbers in it. Pure.

Clients shorten a conversation by the wording of their own API, which each dialect makes of this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.dialects.base import ErrorFacts

_OVERFLOW = re.compile(
    r"maximum context length|context (?:size|length|window)|prompt is too long|input token count", re.IGNORECASE
)
_LIMIT = re.compile(r"(?:maximum context length (?:is|of)|context (?:size|length|window)(?: is| of| \()*)\D{0,3}(\d+)")
# In this order: "your prompt has N tokens" (ours), "you requested N tokens" (OpenAI), "request (N tokens)" (llama.cpp).
_ASKED = tuple(
    re.compile(before + r"(\d+) tokens") for before in ("has (?:at least )?", "requested (?:about )?", r"\(")
)


@dataclass(frozen=True, slots=True)
class Overflow:
    """How many tokens the prompt has and how many there may be, where both are said."""

    num_tokens: int
    maximum: int


def is_overflow(facts: ErrorFacts) -> bool:
    if facts.code in ("context_length_exceeded", "kv_pool_too_small"):
        return True
    return facts.status in (400, 413, 422) and facts.param is None and bool(_OVERFLOW.search(facts.message))


def read_overflow(message: str) -> Overflow | None:
    """One place of the context is for the answer, so that a prompt may also be too long by none."""
    limit = _LIMIT.search(message)
    asked = next((found for pattern in _ASKED if (found := pattern.search(message))), None)
    if limit is None or asked is None:
        return None
    num_tokens, maximum = int(asked[1]), int(limit[1])
    return Overflow(num_tokens, min(maximum, num_tokens - 1))
