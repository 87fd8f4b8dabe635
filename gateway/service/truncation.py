"""Whether an upstream has read the whole prompt: some cut it to their own context and say nothing. Pure."""

from __future__ import annotations

_MIN_BYTES = 16 * 1024  # of a body: below it templates and rounding say more than a ratio
_MAX_BYTES_PER_TOKEN = 20  # text of any language has far fewer; so has code, once its blanks are left out
_NO_TEXT = (b"base64,", b'"base64"', b'"image', b'"input_image"', b'"input_audio"', b'"file')  # few tokens, many bytes
NOTICE = (
    "the upstream counts far fewer prompt tokens than the request holds: it seems to have cut the prompt. "
    "Give it a longer context"
)


def looks_truncated(body: bytes, prompt_tokens: int) -> bool:
    """By the bytes of a request and the tokens that its answer counts. Doubt counts as no."""
    if len(body) < _MIN_BYTES or any(mark in body for mark in _NO_TEXT):
        return False
    blanks = 2 * body.count(b"  ")
    return prompt_tokens * _MAX_BYTES_PER_TOKEN < len(body) - blanks
