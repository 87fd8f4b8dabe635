"""What passes through of OpenAI's Responses, read without being rebuilt. Whatever it can't read counts as nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from backends.protocol.messages import Usage
from gateway.core.sse_scan import Frame
from gateway.dialects.sniff import NOTHING, Seen, Sniffer, is_count, lenient

_STATUS_OF_CODE = {"rate_limit_exceeded": 429, "context_length_exceeded": 400, "invalid_prompt": 400}
_TEXT_ENDS = (".delta", ".output_item.done")
_parse = lenient(msgspec.json.Decoder(dict[str, Any]).decode)


def sniff_response_event(frame: Frame) -> Seen:
    event = None if frame.data is None else _parse(frame.data)
    name = event.get("type") if event is not None else None
    if event is None or not isinstance(name, str):
        return NOTHING
    if name in ("response.completed", "response.incomplete"):
        return _ended(event.get("response"))
    if name == "response.failed":
        response = event.get("response")
        return _error(response.get("error") if isinstance(response, dict) else None)
    if name == "error":
        return _error(event.get("error") or event)
    return Seen(text=True) if name.endswith(_TEXT_ENDS) else NOTHING


def sniff_response(body: bytes) -> Seen:
    """The same of an answer that is one JSON object."""
    response = _parse(body)
    if response is None:
        return NOTHING
    if response.get("error"):
        return _error(response["error"])
    return replace(_ended(response), text=bool(response.get("output")))


def _ended(response: Any) -> Seen:
    if not isinstance(response, dict):
        return Seen(done=True, finish_reason="unknown")
    status, usage = response.get("status"), response.get("usage")
    reason = {"completed": "stop", "incomplete": "length"}.get(str(status), "unknown")
    return Seen(done=True, finish_reason=reason, usage=_usage(usage) if isinstance(usage, dict) else None)


def _error(error: Any) -> Seen:
    """The event's error is told as the body that an HTTP answer would have."""
    if not isinstance(error, dict):
        return Seen(error=True)
    fields = {"message": error.get("message"), "type": error.get("type"), "param": error.get("param")}
    body = msgspec.json.encode({"error": fields | {"code": error.get("code")}})
    return Seen(error=True, error_code=_STATUS_OF_CODE.get(str(error.get("code"))), error_body=body)


def _usage(usage: dict[str, Any]) -> Usage | None:
    prompt, generated, details = (
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        usage.get("input_tokens_details"),
    )
    if not is_count(prompt) or not is_count(generated):
        return None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(prompt_tokens=prompt, completion_tokens=generated, cached_tokens=cached if is_count(cached) else 0)


RESPONSES = Sniffer(sniff_response_event, sniff_response)
