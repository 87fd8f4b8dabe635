"""What passes through, read without being rebuilt: first text, usage, finish reason and errors of an OpenAI stream.

Reads both chat and text completions. Whatever it can't read counts as nothing: the bytes go on all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from backends.protocol.messages import Usage
from gateway.core.sse_scan import DONE, Frame


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
_MAX_COUNT = 1 << 31
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one frame holds."""

    text: bool = False
    finish_reason: str | None = None
    usage: Usage | None = None
    usage_only: bool = False  # a chunk without choices, sent because usage was asked for
    error: bool = False
    error_code: int | None = None  # an HTTP status, if the error names one
    done: bool = False


NOTHING = Seen()
_TEXT = Seen(text=True)
_DONE = Seen(done=True)


def sniff(frame: Frame) -> Seen:
    if frame.data is None:
        return NOTHING
    if frame.data.strip() == DONE:
        return _DONE
    if frame.event == "error":
        return Seen(error=True, error_code=_error_code(_parse(frame.data)))
    chunk = _parse(frame.data)
    return NOTHING if chunk is None else _read(chunk)


def sniff_whole(body: bytes) -> Seen:
    """The same of an answer that is one JSON object."""
    chunk = _parse(body)
    return NOTHING if chunk is None else _read(chunk)


def _parse(data: bytes) -> _Chunk | None:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _read(chunk: _Chunk) -> Seen:
    if chunk.error:
        return Seen(error=True, error_code=_error_code(chunk))
    choices = chunk.choices or ()
    text = any(_has_text(choice) for choice in choices)
    reason = next((choice.finish_reason for choice in choices if isinstance(choice.finish_reason, str)), None)
    if chunk.usage is None and reason is None:
        return _TEXT if text else NOTHING
    usage = _usage(chunk.usage)
    return Seen(text=text, finish_reason=reason, usage=usage, usage_only=chunk.choices == [] and usage is not None)


def _has_text(choice: _Choice) -> bool:
    if choice.text:
        return True
    said = choice.delta if choice.delta is not None else choice.message
    return said is not None and (any(said.get(key) for key in _TEXT_KEYS) or bool(said.get("tool_calls")))


def _error_code(chunk: _Chunk | None) -> int | None:
    code = chunk.error.get("code") if chunk is not None and isinstance(chunk.error, dict) else None
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else None


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not _is_count(prompt) or not _is_count(completion):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = usage.get("prompt_cache_hit_tokens", usage.get("cache_read_input_tokens"))
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached if _is_count(cached) else 0)


def _is_count(value: Any) -> TypeGuard[int]:
    """A number that an honest server sends; any other would spoil the counters for good."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
