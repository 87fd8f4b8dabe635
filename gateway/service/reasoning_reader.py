"""Splits the reasoning that begins an answer off its text, while it is written. Pure.

    think     <think>...</think>: Qwen 3, DeepSeek R1 and most others
    bracket   [THINK]...[/THINK]: Mistral's

Line ends inside the marks and behind them belong to the marks. Reasoning that is never closed stays reasoning.
"""

from __future__ import annotations

from enum import Enum, auto

from gateway.service.call_finder import MAX_SPACE, partial_end

MARKS = {"think": ("<think>", "</think>"), "bracket": ("[THINK]", "[/THINK]")}
_SPACE = " \t\n\r"


class _Where(Enum):
    START = auto()
    OPENED = auto()
    REASONING = auto()
    CLOSED = auto()
    ANSWER = auto()


class ReasoningReader:
    """One choice's text. What it gives out, joined, doesn't depend on how the text was cut."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening = opening
        self._closing = closing
        self._where = _Where.START
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._where in (_Where.OPENED, _Where.REASONING)

    @property
    def in_answer(self) -> bool:
        return self._where is _Where.ANSWER

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that are certain by now; the reasoning comes first."""
        if self.in_answer:
            return "", text
        self._held += text
        if self._where is _Where.START:
            self._start()
        reasoning = self._reasoning() if self.in_reasoning else ""
        if self._where is _Where.CLOSED:
            self._held = self._held.lstrip("\r\n")
            if self._held:
                self._where = _Where.ANSWER
        return reasoning, self._rest() if self.in_answer else ""

    def finish(self) -> tuple[str, str]:
        rest = self._rest()
        return ("", rest) if self._where is _Where.START else (rest, "")

    def _start(self) -> None:
        begun = self._held.lstrip(_SPACE)
        if len(self._held) - len(begun) > MAX_SPACE:
            self._where = _Where.ANSWER
        elif begun.startswith(self._opening):
            self._held = begun[len(self._opening) :]
            self._where = _Where.OPENED
        elif not self._opening.startswith(begun):
            self._where = _Where.ANSWER

    def _reasoning(self) -> str:
        if self._where is _Where.OPENED:
            self._held = self._held.lstrip("\r\n")
            if not self._held:
                return ""
            self._where = _Where.REASONING
        end = self._held.find(self._closing)
        if end >= 0:
            text, self._held = self._held[:end], self._held[end + len(self._closing) :]
            self._where = _Where.CLOSED
            return text[: _end_of_lines(text)]
        certain = len(self._held) - partial_end(self._held, self._closing)
        certain = _end_of_lines(self._held[:certain])
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        return rest


def _end_of_lines(text: str) -> int:
    """Where line ends begin that may belong to the closing mark."""
    return max(len(text.rstrip("\r\n")), len(text) - MAX_SPACE)
