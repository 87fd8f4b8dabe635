"""A decode server's answer as a client should see it. Pure: bytes of JSON in, bytes out.

The decode server counts transferred KV as found in its prefix cache; only the prefill server knows what was. And it
tells addresses of servers, which are not the client's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.errors import UpstreamError
from gateway.core.sse_scan import DONE, Frame, SseScanner

_FAILED = re.compile(rb'"finish_reason"\s*:\s*"error"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')  # some servers say `"usage": null` with every token
_EVENT = b"data:"
_ERROR = b'{"error"'
_MAX_LEAD = 32  # bytes in which an error has begun
_TRANSFER = (b'"kv_transfer_params"', b'"disaggregated_params"')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class PrefillUsage:
    """What the prefill server said of the prompt. None = it didn't say."""

    cached_tokens: int | None = None


UNKNOWN = PrefillUsage()


def needs_usage(data: bytes) -> bool:
    """Whether `tidied` may want to know the prefill's usage."""
    return _USAGE.search(data) is not None


def told_error(data: bytes) -> UpstreamError | None:
    """An error in the place of an event or an answer, as the engines write it once they have answered 200."""
    if not data.lstrip().startswith(_ERROR):
        return None
    try:
        error = msgspec.json.decode(data, type=dict[str, Any])["error"]
    except (msgspec.MsgspecError, RecursionError):
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 502
    return UpstreamError("The server has answered with an error.", status=status)


def told_error_in(chunk: bytes) -> UpstreamError | None:
    """The same of bytes of a stream or of an answer, of which an error is the beginning."""
    return told_error(chunk.removeprefix(_EVENT).partition(b"\n")[0]) if _ERROR in chunk[:_MAX_LEAD] else None


def tidied(data: bytes, prefill: PrefillUsage) -> bytes:
    """One JSON object of an answer: the prefill's cached tokens, no transfer parameters. Raises if it is a failure."""
    if _FAILED.search(data) is not None:
        raise UpstreamError(
            "The decode server ended the answer with finish reason error: it could not load the prefill's KV.",
            status=502,
        )
    if not needs_usage(data) and not any(name in data for name in _TRANSFER):
        return data
    try:
        fields: dict[str, Any] = dict(_fields(data))
        usage = msgspec.json.decode(fields.get("usage", b"null"))
        had_params = _drop_transfer(fields)
    except (msgspec.MsgspecError, RecursionError):
        return data
    if isinstance(usage, dict):
        fields["usage"] = _with_cached(usage, prefill.cached_tokens)
    return msgspec.json.encode(fields) if had_params or isinstance(usage, dict) else data


def _drop_transfer(fields: dict[str, Any]) -> bool:
    """Take out what two servers tell one another; whether there was any of it."""
    had = fields.pop("kv_transfer_params", None) is not None
    raw = fields.get("choices", b"")
    if _TRANSFER[1] not in bytes(raw):
        return had
    choices = msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]])
    found = [choice.pop("disaggregated_params", None) for choice in choices]
    if all(params is None for params in found):
        return had
    fields["choices"] = choices
    return True


def prefills_own(body: bytes) -> bytes:
    """The answer of a prefill server that is the whole one, without what was meant for the decode server."""
    cleaned = tidied(body, prefill_usage(body))
    fields = dict(_fields(cleaned))
    if fields.pop("prompt_token_ids", None) is None:
        return cleaned
    return msgspec.json.encode(fields)


def tidied_frame(frame: Frame, prefill: PrefillUsage) -> bytes:
    """The same of one event of a stream."""
    if frame.data is None or frame.data.strip() == DONE:
        return frame.raw
    data = tidied(frame.data, prefill)
    return frame.raw if data is frame.data else b"data: " + data + b"\n\n"


def _with_cached(usage: dict[str, Any], cached: int | None) -> dict[str, Any]:
    details = usage.get("prompt_tokens_details")
    kept = {k: v for k, v in details.items() if k != "cached_tokens"} if isinstance(details, dict) else {}
    if cached is not None:
        kept["cached_tokens"] = cached
    return usage | {"prompt_tokens_details": kept or None} if kept or details is not None else usage


def prefill_usage(body: bytes) -> PrefillUsage:
    """Of a whole answer, or of a stream's last usage."""
    if body.lstrip()[:1] == b"{":
        return _usage_of(body) or UNKNOWN
    scanner = SseScanner()
    frames = scanner.feed(body)
    found = [usage for frame in frames if frame.data and (usage := _usage_of(frame.data)) is not None]
    return found[-1] if found else UNKNOWN


def _usage_of(data: bytes) -> PrefillUsage | None:
    if not needs_usage(data):
        return None
    try:
        usage = msgspec.json.decode(_fields(data).get("usage", b"null"))
    except (msgspec.MsgspecError, RecursionError):
        return None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    is_count = isinstance(cached, int) and not isinstance(cached, bool) and cached >= 0
    return PrefillUsage(cached) if is_count else None


def as_stream(body: bytes, *, is_chat: bool, include_usage: bool) -> bytes:
    """A whole answer as the stream that was asked for."""
    answer = msgspec.json.decode(body, type=dict[str, Any])
    base: dict[str, Any] = {name: answer[name] for name in ("id", "created", "model") if name in answer}
    base["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    chunks: list[Any] = [base | {"choices": [_as_chunk(choice, is_chat) for choice in answer.get("choices") or ()]}]
    if include_usage and answer.get("usage"):
        chunks.append(base | {"choices": [], "usage": answer["usage"]})
    frames = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*frames, b"data: [DONE]\n\n"])


def _as_chunk(choice: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    kept = {name: value for name, value in choice.items() if name != "message"}
    return kept | ({"delta": _as_delta(choice.get("message") or {})} if is_chat else {})


def _as_delta(message: dict[str, Any]) -> dict[str, Any]:
    """In a stream every tool call says which one it is."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    numbered = [{"index": i, **call} if isinstance(call, dict) else call for i, call in enumerate(calls)]
    return message | {"tool_calls": numbered}
