"""Finds stop strings in a text that arrives in pieces. Pure; knows nothing of tokens.

Where a stop string begins never depends on how the text was cut: of several, the one that is complete first wins, and
of those that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Knuth-Morris-Pratt: after each character, how long a prefix of `stop` the text ends with."""

    __slots__ = ("_failure", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._failure = _failure_table(stop)

    def advance(self, character: str) -> bool:
        """True: the stop string is complete."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._failure[matched - 1]
        self.matched = matched + (self.stop[matched] == character)
        return self.matched == len(self.stop)

    def pass_over(self) -> None:
        """Take a complete match for text: only a later one counts, which may overlap with it."""
        if self.matched == len(self.stop):
            self.matched = self._failure[-1]


def _failure_table(stop: str) -> list[int]:
    """At i: the longest proper prefix of stop[: i + 1] that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        length += stop[position] == stop[length]
        table[position] = length
    return table


class StopFilter:
    """Lets text through, but holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        longest_first = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._patterns = [_Pattern(stop) for stop in longest_first]
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """The text that is certain by now. After a match: nothing, ever.

        Without `may_match` no stop string ends in `text`, but one may begin there.
        """
        if self.matched_stop is not None:
            return ""
        if not self._patterns:
            return text
        for position, character in enumerate(text):
            if (stop := self._advance(character)) is not None:
                if not may_match:
                    for pattern in self._patterns:
                        pattern.pass_over()
                    continue
                self.matched_stop = stop
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: -len(stop)]
        return self._release(self._held + text)

    def finish(self) -> str:
        """What was held back; no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Every pattern sees every character, or a later match would be missed."""
        complete = [pattern.stop for pattern in self._patterns if pattern.advance(character)]
        return complete[0] if complete else None

    def _release(self, text: str) -> str:
        num_held = max(pattern.matched for pattern in self._patterns)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]
