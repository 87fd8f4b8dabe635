"""When an answer's tokens came. Pure arithmetic over instants it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenClock:
    """Time to the first token that carries text, and the gaps between tokens."""

    arrived_at: float
    first_text_at: float | None = None
    num_chunks: int = 0
    _last_at: dict[int, float] = field(default_factory=dict)  # by choice
    _gaps: list[float] = field(default_factory=list)  # per token when counts are known, else per chunk
    _counted: bool = False

    def tokens(self, num_tokens: int, *, has_text: bool, index: int = 0) -> None:
        """An engine's chunk of `num_tokens`. Chunks whose text is held back count too: their tokens were made."""
        if num_tokens == 0 and not has_text:
            return  # a part of the prompt was computed, nothing was made
        now = time.monotonic()
        self._counted = True
        last_at = self._last_at.get(index)
        if last_at is not None and num_tokens > 0:
            self._gaps.extend([(now - last_at) / num_tokens] * num_tokens)
        self._mark(now, has_text, index)

    def text_chunk(self) -> None:
        """A chunk of text from an upstream that doesn't say how many tokens are in it."""
        now = time.monotonic()
        last_at = self._last_at.get(0)
        if last_at is not None:
            self._gaps.append(now - last_at)
        self._mark(now, True)

    def _mark(self, now: float, has_text: bool, index: int = 0) -> None:
        self._last_at[index] = now
        self.num_chunks += 1
        if has_text and self.first_text_at is None:
            self.first_text_at = now

    def time_to_first_token_seconds(self) -> float | None:
        return None if self.first_text_at is None else self.first_text_at - self.arrived_at

    def inter_token_seconds(self, completion_tokens: int | None) -> Sequence[float]:
        """Gap of each token. For chunks of unknown size the total tells the mean size; without it, nothing is said."""
        if self._counted or not self._gaps:
            return self._gaps
        if completion_tokens is None or completion_tokens < 2:
            return ()
        tokens_per_chunk = (completion_tokens - 1) / len(self._gaps)
        return [gap / tokens_per_chunk for gap in self._gaps]


def summary(gaps: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum."""
    ordered = sorted(gaps)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[round(last * 0.5)],
        "p95": ordered[round(last * 0.95)],
        "max": ordered[-1],
    }
