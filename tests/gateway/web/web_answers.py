"""What upstreams of these tests answer most: one answer whole and as a stream, errors, and one script after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from web_support import DONE, ROLE, Step, chunk, http_answer, sse_answer

from gateway.settings.schema import RetrySettings

WHOLE: dict[str, Any] = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]
}
PLAIN = http_answer(json.dumps(WHOLE).encode())
STREAM = sse_answer(ROLE, chunk("hi"), chunk(finish="stop"), DONE)
HELLO = ROLE + chunk("平") + chunk("台") + chunk(finish="stop")  # what follows is up to the test

FAST = RetrySettings(first_delay_seconds=0.0)
ONCE = RetrySettings(max_attempts=1)


def error_answer(status: int, *, extra: str = "", body: bytes = b'{"error":{"message":"no","type":"t"}}') -> list[Step]:
    return http_answer(body, status=f"{status} No", extra=extra)


def in_turn(*scripts: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """The first request gets the first script, and so on; the last one is for all that follow."""
    left = list(scripts)
    return lambda _request: left.pop(0) if len(left) > 1 else left[0]


def tries(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Who was asked for a request, and how that ended."""
    return [(attempt["backend"], attempt["outcome"]) for attempt in record["attempts"]]


def without_comments(body: bytes) -> bytes:
    """The stream without the gateway's own timing line."""
    head, _, rest = body.partition(b": kvgate ")
    return head + rest.partition(b"\n\n")[2] if rest else head
