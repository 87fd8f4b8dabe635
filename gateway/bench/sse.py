"""Server-sent events out of raw bytes, however the network cut them. Pure; knows nothing of what the events mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event. Comments are no events."""

    data: str
    name: str = "message"


class SseParser:
    """Feed it chunks; it returns the events that are complete. Lines may end in CR, LF or CRLF and be any length."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._name = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events completed by this chunk, in order."""
        buffered = self._rest + chunk
        # A CR at the very end may be the first half of a CRLF: it waits for the next chunk.
        held = b"\r" if buffered.endswith(b"\r") else b""
        body = buffered[: len(buffered) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = body.split(b"\n")
        self._rest = rest + held
        events = (self._take(line.decode("utf-8", "replace")) for line in lines)
        return [event for event in events if event is not None]

    def _take(self, line: str) -> SseEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return SseEvent("\n".join(data), name or "message") if data else None
