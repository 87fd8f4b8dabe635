"""Server-sent events, on bytes: cuts a stream into whole frames however it was split. Knows nothing of what data means.

The frames' raw bytes, joined, are the stream again, byte for byte. Two faults of real servers are repaired on the way:
events separated by a single line end instead of a blank line, and `data: data: {...}`.
"""

from __future__ import annotations

import re

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_LINES = 100_000  # of one event
_MAX_MENDED_LINES = 100  # of one event whose end has to be guessed: each guess reads all of them
_LINE_END = re.compile(rb"[\r\n]")
_BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
_USUAL_START, _USUAL_END = b"data: {", b"}\n\n"


class FrameTooLong(ValueError):
    """One event is longer than any honest server sends."""


class Frame(msgspec.Struct, frozen=True):
    """One event as it came, with its blank line. `data` is None for comments and stray line ends."""

    raw: bytes
    data: bytes | None
    event: str = ""


class SseScanner:
    """Feed it bytes as they arrive; it returns the frames that are now complete."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()  # from the start of the frame that is not complete yet
        self._line_start = 0  # of the line that is not complete yet, in the buffer
        self._searched = 0  # the buffer has no line end from _line_start up to here
        self._data: list[bytes] = []
        self._event = ""
        self._after_cr = False  # a line feed that follows belongs to the line end before it
        self._at_start = True
        self._single_line_ends = False
        self._frames: list[Frame] = []

    def feed(self, chunk: bytes) -> list[Frame]:
        """The frames that `chunk` completes, in order."""
        taken = self._take_usual(chunk) if self._is_between_events() else 0
        if taken < len(chunk):
            self._buffer += chunk[taken:] if taken else chunk
            self._scan()
        if len(self._buffer) > self._max_frame_bytes:
            raise FrameTooLong(f"An event is longer than {self._max_frame_bytes} bytes.")
        if len(self._data) > _MAX_LINES:
            raise FrameTooLong(f"An event has more than {_MAX_LINES} lines.")
        frames, self._frames = self._frames, []
        return frames

    def finish(self) -> Frame | None:
        """What is left when the stream ends: an event without its blank line, or nothing."""
        if not self._buffer:
            return None
        rest = bytes(self._buffer[self._line_start :])
        if rest.strip(b"\r\n"):
            self._take_line(rest, self._line_start)
        if self._data and not self._buffer.endswith((b"\n", b"\r")):
            self._buffer += b"\n"
        frame = Frame(bytes(self._buffer), self._take_data(), self._event)
        self._buffer.clear()
        return frame

    def _is_between_events(self) -> bool:
        return not (self._buffer or self._data or self._event or self._after_cr or self._single_line_ends)

    def _take_usual(self, chunk: bytes) -> int:
        """Events of one line of JSON and a blank line, which nearly all are: a short way to what `_scan` would say."""
        start = 0
        while chunk.startswith(_USUAL_START, start):
            end = chunk.find(b"\n", start)
            if end < 0 or not chunk.startswith(_USUAL_END, end - 1) or chunk.find(b"\r", start, end) >= 0:
                break
            self._frames.append(Frame(chunk[start : end + 2], chunk[start + 6 : end]))
            self._at_start = False
            start = end + 2
        return start

    def _scan(self) -> None:
        while True:
            if self._after_cr and self._line_start < len(self._buffer):
                self._after_cr = False
                if self._buffer[self._line_start] == 0x0A:
                    self._skip_to(self._line_start + 1)
            match = _LINE_END.search(self._buffer, self._searched)
            if match is None:
                self._searched = len(self._buffer)
                return
            end = match.start()
            line = bytes(self._buffer[self._line_start : end])
            self._after_cr = self._buffer[end] == 0x0D
            start = self._line_start
            self._skip_to(end + 1)
            if self._after_cr and self._buffer[end + 1 : end + 2] == b"\n":
                self._after_cr = False
                self._skip_to(end + 2)
            self._take_line(line, start)

    def _skip_to(self, position: int) -> None:
        self._line_start = self._searched = position

    def _take_line(self, line: bytes, start: int) -> None:
        """One line, which begins at `start` of the buffer; the buffer's position is behind its end."""
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            self._dispatch(self._line_start)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._take_value(value, start)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")

    def _take_value(self, value: bytes, start: int) -> None:
        if value.startswith((b"data:", b"data: ")):
            value = self._drop_doubled_name(value, start)
            start = min(start, self._line_start)
        if self._data and value.startswith((b"{", DONE)) and self._is_whole_so_far():
            self._single_line_ends = True
            self._dispatch(start, repair=b"\n")
        self._data.append(value)
        if self._single_line_ends and _is_whole(value):
            self._dispatch(self._line_start, repair=b"\n")

    def _is_whole_so_far(self) -> bool:
        return len(self._data) <= _MAX_MENDED_LINES and _is_whole(b"\n".join(self._data))

    def _drop_doubled_name(self, value: bytes, start: int) -> bytes:
        """Rewrites the line in the buffer: a client could not read it either."""
        inner = value.removeprefix(b"data:").removeprefix(b" ")
        old = bytes(self._buffer[start : self._line_start]) or bytes(self._buffer[start:])
        new = old.replace(value, inner, 1)
        self._buffer[start : start + len(old)] = new
        if self._line_start > start:
            self._skip_to(self._line_start + len(new) - len(old))
        return inner

    def _dispatch(self, end: int, repair: bytes = b"") -> None:
        """Everything up to `end` is one frame."""
        raw = bytes(self._buffer[:end]) + repair
        del self._buffer[:end]
        self._skip_to(self._line_start - end)
        self._frames.append(Frame(raw, self._take_data(), self._event))
        self._event = ""

    def _take_data(self) -> bytes | None:
        data, self._data = self._data, []
        return b"\n".join(data) if data else None


def _is_whole(data: bytes) -> bool:
    """Whether the data so far is one complete thing, so that more of it can only be the next event."""
    if data == DONE:
        return True
    if not (data.startswith(b"{") and data.endswith(b"}")):
        return False
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
