"""Renders scripted answers as the Gemini dialect does, and reads the frames back exactly as Google's JS client does."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from backends.protocol.messages import Usage
from gateway.core.types import Delta, FinishReason, Started
from gateway.dialects.base import AnswerContext
from gateway.dialects.gemini_answer import GenerateContext
from gateway.dialects.gemini_events import ArrayRenderer, GenerateRenderer

USAGE = Usage(prompt_tokens=30, completion_tokens=7, cached_tokens=10)
USAGE_METADATA = {
    "promptTokenCount": 30,
    "candidatesTokenCount": 7,
    "totalTokenCount": 37,
    "cachedContentTokenCount": 10,
}
THINKING = GenerateContext(include_thoughts=True)
Chunk = dict[str, Any]


def make_renderer(chat_context: Any = None) -> GenerateRenderer:
    return GenerateRenderer(AnswerContext("ab" * 16, 1, "smollm2", chat_context=chat_context))


def make_array_renderer(chat_context: Any = None) -> ArrayRenderer:
    return ArrayRenderer(AnswerContext("ab" * 16, 1, "smollm2", chat_context=chat_context))


def play(
    renderer: GenerateRenderer,
    deltas: Iterable[Delta],
    reason: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
) -> bytes:
    frames = renderer.begin(Started(prompt_tokens=30, max_tokens=100)) + renderer.start(0)
    frames += b"".join(map(renderer.delta, deltas))
    return frames + renderer.end(0, reason, stop_reason) + renderer.finish(USAGE)


def stream(deltas: Iterable[Delta], *end: Any, chat_context: Any = None) -> bytes:
    return play(make_renderer(chat_context), deltas, *end)


def chunks_of(deltas: Iterable[Delta], *end: Any, chat_context: Any = None) -> list[Chunk]:
    return read_js([stream(deltas, *end, chat_context=chat_context)])


class JsError(Exception):
    """What the client throws; `status` of an ApiError."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


# `.` of JavaScript stops at every line terminator of its own.
_JS_FRAME = re.compile("\\s*data: ([^\n\r\u2028\u2029]*)(?:\n\n|\r\r|\r\n\r\n)")


def read_js(reads: Iterable[bytes]) -> list[Chunk]:
    """`processStreamResponse` of @google/genai, line by line, on what each read of the body returns."""
    decoder, buffer, chunks = codecs.getincrementaldecoder("utf-8")(), "", []
    for piece in reads:
        said = decoder.decode(piece)
        _throw_error(said)
        buffer += said
        while match := _JS_FRAME.match(buffer):
            chunks.append(json.loads(match[1]))
            buffer = buffer[match.end() :]
    if buffer.strip():
        raise JsError("Incomplete JSON segment at the end")
    return chunks


def _throw_error(said: str) -> None:
    try:
        value = json.loads(said)
    except ValueError:
        return
    if isinstance(value, dict) and 400 <= value.get("error", {}).get("code", 0) < 600:
        raise JsError(f"got status: {value['error']['status']}. {said}", value["error"]["code"])


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The same bytes as reads of a socket may return them."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges) if stop > start]


def parts_of(chunks: Sequence[Chunk], index: int = 0) -> list[dict[str, Any]]:
    """The parts of a candidate, pieces of one text joined, what is empty left out."""
    joined: list[dict[str, Any]] = []
    for chunk in chunks:
        for candidate in chunk["candidates"]:
            if candidate["index"] == index:
                assert candidate["content"]["role"] == "model"
                for part in candidate["content"]["parts"]:
                    _join(joined, part)
    return joined


def _join(joined: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part.get("text") == "":
        return
    if "text" in part and joined and "text" in joined[-1] and joined[-1].get("thought") == part.get("thought"):
        joined[-1] = joined[-1] | {"text": joined[-1]["text"] + part["text"]}
    else:
        joined.append(part)
