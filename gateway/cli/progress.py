"""A progress bar on one line of a terminal. Writes nothing where there is no terminal, unless told to."""

from __future__ import annotations

from typing import TextIO

BAR_WIDTH = 24


class ProgressBar:
    """Shows one pass at a time. Without a terminal, but asked for, it writes one line when a pass ends."""

    def __init__(self, stream: TextIO, *, forced: bool = False) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._shows = self._rewrites or forced
        self._label, self._total, self._done, self._failed = "", 0, 0, 0

    def begin(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._failed = label, total, 0, 0
        self._draw()

    def advance(self, *, failed: bool) -> None:
        self._done += 1
        self._failed += failed
        self._draw()

    def end(self) -> None:
        """Leave a terminal's line clean; elsewhere say how the pass went."""
        if not self._shows:
            return
        self._stream.write("\r\x1b[K" if self._rewrites else self._line() + "\n")
        self._stream.flush()

    def _draw(self) -> None:
        if self._rewrites:
            self._stream.write("\r\x1b[K" + self._line())
            self._stream.flush()

    def _line(self) -> str:
        filled = BAR_WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._label} [{bar}] {self._done}/{self._total}{failed}"
