"""A lower bound of how many tokens a text has, without encoding it: megabytes can be refused at once."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

# What a normalizer may do to the length: the most UTF-8 bytes of input per byte of output. Unicode composition
# turns at most three bytes into one on average (Hangul: three letters of three bytes into one of three).
_SHRINKS = {"NFC": 4, "Prepend": 1}


class TokenBound:
    """`at_least(text)` is 0 where this tokenizer may swallow text of any length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)
        longest_character = 1 if _has_step(tokenizer.pre_tokenizer, "ByteLevel") else 4  # in UTF-8
        longest_added = max((len(token.content.encode()) for token in added), default=0)
        longest_token = max(longest * longest_character, longest_added)
        self._bytes_per_token = longest_token * (_shrinking(tokenizer) or 0)
        self._skips_spaces = any(token.lstrip or token.rstrip for token in added)

    def at_least(self, text: str) -> int:
        if not self._bytes_per_token:
            return 0
        if self._skips_spaces:  # some special tokens take any number of spaces around them with them
            text = "".join(text.split())
        num_bytes = len(text.encode(errors="replace"))
        return -(-num_bytes // self._bytes_per_token)


def _shrinking(tokenizer: Tokenizer) -> int | None:
    """How much longer than its tokens a text can be; None: there is no limit."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    if not (_has_step(tokenizer.pre_tokenizer, "ByteLevel") or model.byte_fallback):
        return None  # unknown characters could be fused into one token
    factor = 1
    for step in _steps(tokenizer.normalizer):
        shrinks = 1 if _replaces_one_space(step) else _SHRINKS.get(step["type"])
        if shrinks is None:
            return None
        factor *= shrinks
    return factor


def _steps(component: Any) -> list[dict[str, Any]]:
    """The description of a normalizer or pre-tokenizer, a sequence taken apart."""
    if component is None:
        return []
    description = json.loads(component.__getstate__())
    nested: list[dict[str, Any]] | None = description.get("normalizers") or description.get("pretokenizers")
    return [description] if nested is None else nested


def _has_step(component: Any, kind: str) -> bool:
    return any(step.get("type") == kind for step in _steps(component))


def _replaces_one_space(step: dict[str, Any]) -> bool:
    """Sentencepiece's: every space becomes a longer character."""
    return step["type"] == "Replace" and step["pattern"] == {"String": " "} and len(step["content"]) >= 1
