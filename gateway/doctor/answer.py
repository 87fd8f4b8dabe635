"""What came back for one request, with the time of every event. Plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    at_seconds: float  # after the request was sent
    name: str  # of its `event:` line
    data: str


@dataclass(frozen=True, slots=True)
class Answer:
    """`failure` is set where no whole HTTP answer came; then the other fields say how far it got."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""  # of an answer that is no stream
    events: tuple[Event, ...] = ()
    num_comments: int = 0  # heartbeats of the chat API
    first_byte_seconds: float = 0.0  # of the body; the headers come before it
    longest_silence_seconds: float = 0.0
    total_seconds: float = 0.0
    failure: str = ""

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        """None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def error(self) -> tuple[str, str]:
        """Message and code of an error body of any API."""
        return error_words(self.json()) if self.body else ("", "")


def error_words(answer: Any) -> tuple[str, str]:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return (str(error)[:300] if error else "no message", "")
    return str(error.get("message", "no message"))[:300], str(error.get("code") or error.get("type") or "")
