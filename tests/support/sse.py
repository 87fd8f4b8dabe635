"""Reading a server-sent event stream in tests, strictly: every data line is JSON or [DONE]."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Answer:
    """A whole streamed answer."""

    status: int
    headers: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False
    body: Any = None

    @property
    def text(self) -> str:
        parts = []
        for event in self.events:
            for choice in event.get("choices", ()):
                delta = choice.get("delta")
                parts.append((delta.get("content") if delta is not None else choice.get("text")) or "")
        return "".join(parts)

    @property
    def finish_reason(self) -> str | None:
        reasons = [c["finish_reason"] for e in self.events for c in e.get("choices", ()) if c.get("finish_reason")]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def error(self) -> dict[str, Any] | None:
        errors = [event["error"] for event in self.events if "error" in event]
        return errors[0] if errors else None

    @property
    def usage(self) -> dict[str, Any] | None:
        usages = [event["usage"] for event in self.events if event.get("usage")]
        return usages[0] if usages else None

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """To the end; what has come stays if the reader is called off."""
        buffer = b""
        async for chunk in response.content.iter_any():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                self.take_line(line.decode())

    def take_line(self, line: str) -> None:
        if line.startswith(":"):
            self.comments.append(line[1:].strip())
        elif line.startswith("data:"):
            data = line[5:].strip()
            assert not self.done, "data after [DONE]"
            if data == "[DONE]":
                self.done = True
            else:
                self.events.append(json.loads(data))


async def read_stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    """POST and read to the end of the stream."""
    async with session.post(url, json=body, headers=headers) as response:
        answer = Answer(response.status, {name.lower(): value for name, value in response.headers.items()})
        if response.content_type != "text/event-stream":
            answer.body = await response.json()
            return answer
        await answer.read(response)
        return answer
