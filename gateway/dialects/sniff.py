"""What passes through, read without being rebuilt: first text, usage, finish reason and errors of a stream.

Here those of OpenAI's chat and text completions; those of other APIs next door. Whatever it can't read counts as
nothing: the bytes go on all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import msgspec

from backends.protocol.messages import Usage
from gateway.core.sse_scan import DONE, Frame


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


T = TypeVar("T")


def lenient(decode: Callable[[bytes], T]) -> Callable[[bytes], T | None]:
    """None for what can't be read."""

    def parse(data: bytes) -> T | None:
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    return parse


_parse = lenient(msgspec.json.Decoder(_Chunk).decode)
MAX_CHOICES = 1024  # of one answer, that are told apart
_MAX_COUNT = 1 << 31
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one frame holds."""

    text: bool = False
    finish_reason: str | None = None
    ended: tuple[int, ...] = (0,)  # choices that the finish reason is of
    choices: tuple[int, ...] = ()  # others than the first, that have begun
    usage: Usage | None = None
    usage_only: bool = False  # a chunk without choices, sent because usage was asked for
    error: bool = False
    error_code: int | None = None  # an HTTP status, if the error names one
    error_body: bytes | None = None  # the error as the body of an HTTP answer; None: only our own words can tell it
    done: bool = False


@dataclass(frozen=True, slots=True)
class Sniffer:
    """How one API's answers are read along the way. `closing` ends a stream that has all but its last frame."""

    frame: Callable[[Frame], Seen]
    whole: Callable[[bytes], Seen]
    closing: bytes = b""


NOTHING = Seen()
TEXT = Seen(text=True)  # and nothing else: what nearly every frame holds
_DONE = Seen(done=True)


def sniff(frame: Frame) -> Seen:
    if frame.data is None:
        return NOTHING
    if frame.data.strip() == DONE:
        return _DONE
    if frame.event == "error":
        return _error(_parse(frame.data), frame.data)
    chunk = _parse(frame.data)
    return NOTHING if chunk is None else _read(chunk, frame.data)


def sniff_whole(body: bytes) -> Seen:
    """The same of an answer that is one JSON object."""
    chunk = _parse(body)
    return NOTHING if chunk is None else _read(chunk, body)


def _error(chunk: _Chunk | None, data: bytes) -> Seen:
    body = data if data.lstrip()[:1] == b"{" else None
    return Seen(error=True, error_code=_error_code(chunk), error_body=body)


def _read(chunk: _Chunk, data: bytes) -> Seen:
    if chunk.error:
        return _error(chunk, data)
    text, reason, ended, others = False, None, [], []
    for choice in chunk.choices or ():  # plain loops: this is done for every chunk of every stream
        text = text or _has_text(choice)
        if choice.index != 0:
            others.append(_index(choice))
        if choice.finish_reason == "error":  # of an engine that gave up: clients would take it for a good end
            return Seen(error=True)
        if isinstance(choice.finish_reason, str):
            reason = choice.finish_reason if reason is None else reason
            ended.append(_index(choice))
    if chunk.usage is None and reason is None and not others:
        return TEXT if text else NOTHING
    usage = read_usage(chunk.usage)
    usage_only = chunk.choices == [] and usage is not None
    return Seen(
        text=text,
        finish_reason=reason,
        ended=tuple(ended),
        choices=tuple(others),
        usage=usage,
        usage_only=usage_only,
    )


def _index(choice: _Choice) -> int:
    said = choice.index
    return said if isinstance(said, int) and 0 <= said < MAX_CHOICES else 0


def _has_text(choice: _Choice) -> bool:
    if choice.text:
        return True
    said = choice.delta if choice.delta is not None else choice.message
    if said is None:
        return False
    for key in _TEXT_KEYS:
        if said.get(key):
            return True
    return bool(said.get("tool_calls"))


def _error_code(chunk: _Chunk | None) -> int | None:
    return _status(chunk.error.get("code") if chunk is not None and isinstance(chunk.error, dict) else None)


def _status(code: Any) -> int | None:
    """An HTTP status of a failure, also as a string."""
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else None


def read_usage(usage: dict[str, Any] | None) -> Usage | None:
    if not usage:
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not is_count(prompt) or not is_count(completion):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = usage.get("prompt_cache_hit_tokens", usage.get("cache_read_input_tokens"))
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached if is_count(cached) else 0)


def is_count(value: Any) -> TypeGuard[int]:
    """A number that an honest server sends; any other would spoil the counters for good."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


@dataclass(frozen=True, slots=True)
class SaidError:
    """An error of an upstream, as far as its JSON can be read."""

    message: str
    kind: str | None = None
    code: str | None = None
    param: str | None = None
    status: int | None = None


def error_facts(data: bytes) -> SaidError:
    """Reads `{"error": {...}}`, `{"error": "text"}` and errors without that wrapping."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str) and error:
        return SaidError(error)
    if not isinstance(error, dict):
        return SaidError("The upstream ended its answer with an error.")
    status = _status(error.get("code")) or _status(error.get("status_code"))
    message, code = _string(error.get("message")), error.get("code")
    return SaidError(
        message or "The upstream ended its answer with an error.",
        _string(error.get("type")),
        None if status is not None else _string(code),
        _string(error.get("param")),
        status,
    )


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


OPENAI = Sniffer(sniff, sniff_whole, b"data: [DONE]\n\n")
