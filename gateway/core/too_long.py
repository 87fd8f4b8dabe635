"""The words by which servers, ours and others, say that a prompt is longer than the model can hold. Pure."""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"maximum context length|context (?:size|length|window)|prompt is too long|input token count", re.IGNORECASE
)


def says_too_long(message: str) -> bool:
    return bool(_WORDS.search(message))
