"""What passes through of Anthropic's Messages, read without being rebuilt. Whatever it can't read counts as nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.protocol.messages import Usage
from gateway.core.sse_scan import Frame
from gateway.dialects.sniff import NOTHING, Seen, Sniffer, is_count, lenient

_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 529,
}
_parse = lenient(msgspec.json.Decoder(dict[str, Any]).decode)
_CLOSING = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessagesSniffer:
    """One stream: its counts come in two parts, at the beginning and at the end."""

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {}

    def frame(self, frame: Frame) -> Seen:
        event = None if frame.data is None else _parse(frame.data)
        if event is None or frame.data is None:
            return NOTHING
        return _error(event, frame.data) if event.get("type") == "error" else self._read(event)

    def _read(self, event: dict[str, Any]) -> Seen:
        match event.get("type"):
            case "message_start":
                self._count(event.get("message"))
                return NOTHING
            case "content_block_start":
                block = event.get("content_block")
                return Seen(text=isinstance(block, dict) and block.get("type") not in ("text", "thinking"))
            case "content_block_delta":
                return Seen(text=True)
            case "message_delta":
                self._count(event)
                delta = event.get("delta")
                reason = delta.get("stop_reason") if isinstance(delta, dict) else None
                return Seen(finish_reason=reason if isinstance(reason, str) else None, usage=_usage(self._counts))
            case _:
                return Seen(done=event.get("type") == "message_stop")

    def _count(self, holder: Any) -> None:
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            self._counts |= {name: value for name, value in usage.items() if value is not None}


def sniff_message(body: bytes) -> Seen:
    """The same of an answer that is one JSON object."""
    message = _parse(body)
    if message is None:
        return NOTHING
    if message.get("type") == "error" or message.get("error"):
        return _error(message, body)
    reason, usage = message.get("stop_reason"), message.get("usage")
    return Seen(
        text=bool(message.get("content")),
        finish_reason=reason if isinstance(reason, str) else None,
        usage=_usage(usage) if isinstance(usage, dict) else None,
    )


def sniffer() -> Sniffer:
    return Sniffer(MessagesSniffer().frame, sniff_message, _CLOSING)


def _error(event: dict[str, Any], data: bytes) -> Seen:
    error = event.get("error")
    said = error.get("type") if isinstance(error, dict) else None
    return Seen(error=True, error_code=_STATUS_OF_TYPE.get(str(said)), error_body=data)


def _usage(counts: dict[str, Any]) -> Usage | None:
    """This API counts cached tokens beside `input_tokens`; the prompt is all of them."""
    fresh, generated = counts.get("input_tokens"), counts.get("output_tokens")
    cached = counts.get("cache_read_input_tokens", 0)
    written = counts.get("cache_creation_input_tokens", 0)
    if not (is_count(fresh) and is_count(generated) and is_count(cached) and is_count(written)):
        return None
    return Usage(prompt_tokens=fresh + cached + written, completion_tokens=generated, cached_tokens=cached)
