"""A progress bar that keeps what it was told."""

from __future__ import annotations


class ProgressLog:
    """Keeps what was shown."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def begin(self, label: str, total: int) -> None:
        self.lines.append((label, total))

    def advance(self, *, failed: bool) -> None:
        self.lines.append("failed" if failed else "ok")

    def end(self) -> None:
        self.lines.append("end")
