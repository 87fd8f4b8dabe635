"""What the answers of the two older OpenAI APIs have in common: their envelope, usage and chunks. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.protocol.messages import Usage

encode = msgspec.json.Encoder().encode


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Envelope:
    """One answer's id, time and model. Everything that is the same in each chunk is encoded once."""

    def __init__(self, answer_id: str, created: int, model: str, *, chunk_object: str, include_usage: bool) -> None:
        self._id, self._created, self._model = answer_id, created, model
        self._include_usage = include_usage
        head = {"id": answer_id, "object": chunk_object, "created": created, "model": model}
        self.head = b"data: " + encode(head)[:-1]
        self.tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return self.head + b',"choices":[' + encode(choice) + b"]" + self.tail

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        """Usage without choices, if the client asked for it."""
        if not self._include_usage:
            return b""
        return self.head + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"

    def whole(self, kind: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return encode(
            {
                "id": self._id,
                "object": kind,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": usage,
            }
        )
