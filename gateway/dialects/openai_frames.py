"""What the answers of the two older OpenAI APIs have in common: envelope, usage, chunks, errors. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.protocol.messages import Usage
from gateway.core.types import Started
from gateway.dialects.base import AnswerContext, ErrorFacts

DONE_FRAME = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: every client of these APIs skips it

encode = msgspec.json.Encoder().encode


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_body(facts: ErrorFacts) -> bytes:
    fields = {"message": facts.message, "type": facts.kind, "param": facts.param, "code": facts.code}
    return encode({"error": fields})


class OpenAIRenderer:
    """What does not depend on which of the two it is."""

    def begin(self, started: Started | None) -> bytes:
        return b""

    def heartbeat(self) -> bytes:
        return KEEP_ALIVE

    def error(self, facts: ErrorFacts) -> bytes:
        """The clients raise at an `error` in place of choices."""
        return b"data: " + error_body(facts) + b"\n\n"

    def conversation(self) -> None:
        return None


class Envelope:
    """One answer's id, time and model. Everything that is the same in each chunk is encoded once."""

    def __init__(self, answer_id: str, context: AnswerContext, *, chunk_object: str) -> None:
        self._id, self._created, self._model = answer_id, context.created, context.model
        self._include_usage = context.include_usage
        head = {"id": answer_id, "object": chunk_object, "created": context.created, "model": context.model}
        self.head = b"data: " + encode(head)[:-1]
        self.tail = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return self.head + b',"choices":[' + encode(choice) + b"]" + self.tail

    def last_chunk(self, usage: dict[str, Any]) -> bytes:
        """Usage without choices, if the client asked for it, and the end of the stream."""
        if not self._include_usage:
            return DONE_FRAME
        return self.head + b',"choices":[],"usage":' + encode(usage) + b"}\n\n" + DONE_FRAME

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
