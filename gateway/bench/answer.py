"""One streamed answer, folded from its events and the instants they came. Pure; the caller owns clock and network.

The first token is the first event that carries non-empty text, reasoning or a tool call: a role, an empty delta, a
comment or usage is none. Tokens are counted by `usage`, never by chunks, since a chunk may carry several.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gateway.bench.sse import SseEvent


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class ChunkUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(Struct):
    """What is read of a chunk of /v1/completions or /v1/chat/completions; everything else is left alone."""

    choices: list[Choice] = []
    usage: ChunkUsage | None = None
    error: Any = None


class AnswerReader:
    """Give it every event with the instant at which its bytes arrived."""

    def __init__(self) -> None:
        self.text = ""
        self.num_text_chunks = 0
        self.first_at: float | None = None  # first token that carries text
        self.last_at: float | None = None  # last text or the finish chunk, whichever came later
        self.finish_reason: str | None = None
        self.usage: ChunkUsage | None = None
        self.error: str | None = None
        self.done = False

    def take(self, event: SseEvent, at: float) -> None:
        """Fold one event in."""
        if event.data == "[DONE]":
            self.done = True
            return
        try:
            chunk = msgspec.json.decode(event.data, type=Chunk)
        except (msgspec.DecodeError, UnicodeError) as error:
            self.error = f"a chunk that can't be read: {error}"
            return
        if chunk.error is not None or event.name == "error":
            self.error = error_message(chunk.error) or event.data
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self._take_choice(choice, at)

    def _take_choice(self, choice: Choice, at: float) -> None:
        delta = choice.delta or Delta()
        text = (choice.text or "") + (delta.reasoning_content or "") + (delta.content or "")
        if text or delta.tool_calls:
            self.text += text
            self.num_text_chunks += 1
            self.first_at = at if self.first_at is None else self.first_at
            self.last_at = at
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.last_at = at

    @property
    def tpot_seconds(self) -> float | None:
        """(last - first) / (output tokens - 1); None where one token, or one chunk for all, leaves nothing to time."""
        num_tokens = self.usage.completion_tokens if self.usage else 0
        if self.first_at is None or self.last_at is None or num_tokens < 2 or self.num_text_chunks < 2:
            return None
        return (self.last_at - self.first_at) / (num_tokens - 1)


def error_message(error: object) -> str:
    """The words of an error object of the OpenAI shape, or the thing itself as text."""
    if isinstance(error, dict):
        message = error.get("message")
        return str(message) if message else str(error)
    return "" if error is None else str(error)
