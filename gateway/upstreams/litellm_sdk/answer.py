"""litellm's answers as the bytes of OpenAI's chat API, streamed or whole. Pure but for waiting on the stream.

Strict where an answer would be falsified: litellm ends a stream that broke off with a reason of its own making, and
counts tokens that nobody told it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import CUT, GatewayError, UpstreamGone, UpstreamTimeout
from gateway.upstreams.base import Served
from gateway.upstreams.litellm_sdk.errors import blotted

DONE = b"data: [DONE]\n\n"
_TOLD = (
    "role", "content", "reasoning_content", "thinking_blocks", "refusal", "tool_calls", "function_call", "annotations",
    "images", "audio",
)  # fmt: skip
_COUNTS = (
    "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details",
    "cache_creation_input_tokens", "cache_read_input_tokens",
)  # fmt: skip

ErrorOf = Callable[[BaseException], GatewayError]


class WholeAnswer:
    """An answer that came in one piece."""

    status = 200

    def __init__(self, response: Any, secrets: tuple[str, ...], notices: tuple[str, ...] = ()) -> None:
        self.headers: Mapping[str, str] = {"Content-Type": "application/json"}
        self.served = Served(notices=notices)
        self._body = _encoded(whole_object(_plain(response)), secrets)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def close(self) -> None:
        pass


class StreamedAnswer:
    """A stream whose first chunk has come, so that a refusal is still the status of an answer."""

    status = 200

    def __init__(
        self, stream: Any, idle_seconds: float, secrets: tuple[str, ...], error_of: ErrorOf, notices: tuple[str, ...]
    ) -> None:
        self.headers: Mapping[str, str] = {"Content-Type": "text/event-stream"}
        self.served = Served(notices=notices)
        self._stream = stream
        self._idle_seconds = idle_seconds
        self._secrets = secrets
        self._error_of = error_of
        self._first: Any = None
        self._has_finished = False

    async def begin(self) -> None:
        """Wait for the first chunk. Raises a GatewayError, or TimeoutError if the caller's time is over."""
        self._first = await self._next()

    async def chunks(self) -> AsyncIterator[bytes]:
        chunk, self._first = self._first, None
        while chunk is not None:
            if frame := self._frame(_plain(chunk)):
                yield frame
            chunk = await self._next_in_time()
        if not self._has_finished:
            raise UpstreamGone(CUT)
        yield DONE

    async def close(self) -> None:
        """Ends the provider's work if it isn't finished."""
        close = getattr(self._stream, "aclose", None)
        if close is not None:
            await close()

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        found = chunk_object(chunk)
        if not _were_told_counts(self._stream):
            found.pop("usage", None)
        if any(choice["finish_reason"] for choice in found["choices"]):
            if not _was_told_the_end(self._stream):
                raise UpstreamGone(CUT)
            self._has_finished = True
        if not found["choices"] and "usage" not in found:
            return b""
        return b"data: " + _encoded(found, self._secrets) + b"\n\n"

    async def _next_in_time(self) -> Any:
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await self._next()
        except TimeoutError:
            message = f"The upstream was silent for {self._idle_seconds:g} s within its answer."
            raise UpstreamTimeout(message) from None

    async def _next(self) -> Any:
        """The next chunk; None at the end."""
        try:
            return await anext(self._stream, None)
        except (TimeoutError, GatewayError):
            raise
        except Exception as error:  # providers' code raises anything
            raise self._error_of(error) from None


def _was_told_the_end(stream: Any) -> bool:
    """Whether the provider said why it stopped. Where litellm doesn't keep that, its word counts."""
    names = ("received_finish_reason", "intermittent_finish_reason", "received_any_finish_reason")
    if not any(hasattr(stream, name) for name in names):
        return True
    return any(getattr(stream, name, None) for name in names)


def _were_told_counts(stream: Any) -> bool:
    """Whether the provider said how many tokens there were; else litellm counts with a tokenizer of its own choice."""
    chunks = getattr(stream, "chunks", None)
    return chunks is None or any(getattr(chunk, "usage", None) is not None for chunk in chunks)


def chunk_object(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """One chunk with the API's fields and no others."""
    choices = [
        {
            "index": choice.get("index") or 0,
            "delta": _told(choice.get("delta")),
            "finish_reason": choice.get("finish_reason"),
        }
        | ({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {})
        for choice in chunk.get("choices") or ()
    ]
    return _envelope(chunk, "chat.completion.chunk", choices)


def whole_object(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": choice.get("index") or 0,
            "message": {"role": "assistant", "content": None, **_told(choice.get("message"))},
            "finish_reason": choice.get("finish_reason"),
        }
        | ({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {})
        for choice in answer.get("choices") or ()
    ]
    return _envelope(answer, "chat.completion", choices)


def _envelope(said: Mapping[str, Any], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    found = {"id": said.get("id"), "object": kind, "created": said.get("created"), "model": said.get("model")}
    found["choices"] = choices
    for name in ("system_fingerprint", "service_tier"):
        if said.get(name):
            found[name] = said[name]
    usage = said.get("usage")
    if isinstance(usage, Mapping) and any(usage.get(name) for name in ("prompt_tokens", "completion_tokens")):
        found["usage"] = {name: usage[name] for name in _COUNTS if usage.get(name) is not None}
    return found


def _told(message: Any) -> dict[str, Any]:
    said = message if isinstance(message, Mapping) else {}
    return {name: said[name] for name in _TOLD if said.get(name) is not None}


def _plain(value: Any) -> dict[str, Any]:
    """litellm's objects are pydantic models."""
    found = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
    return found if isinstance(found, dict) else {}


def _encoded(value: Any, secrets: tuple[str, ...]) -> bytes:
    data = msgspec.json.encode(value, enc_hook=str)
    if any(secret.encode() in data for secret in secrets if secret.isascii()):
        return blotted(data.decode(), secrets).encode()
    return data
