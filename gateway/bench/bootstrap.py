"""How sure a difference is: a percentile bootstrap over paired requests. Pure and seeded; knows nothing of requests.

A pair is the same prompt measured in both modes. Pairs are drawn with replacement, the statistic is taken of both
sides of the draw, and the interval holds the middle 95 % of the differences. It covers chance between requests of
this run, not a drift of the machine between runs: that's what several rounds are for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from gateway.bench.percentiles import percentile

Value = TypeVar("Value")

MIN_PAIRS = 5  # below, the interval would be far too narrow to be believed
NUM_RESAMPLES = 2000


class Difference(Struct, frozen=True, kw_only=True):
    """`value` = second - first, with its 95 % interval; the bounds are None where there are too few pairs."""

    value: float
    low: float | None
    high: float | None
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval exists and leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def paired_difference(
    pairs: Sequence[tuple[Value, Value]],
    statistic: Callable[[Sequence[Value]], float],
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Difference | None:
    """The statistic of the second sides less that of the first sides, or None without pairs."""
    return resampled(pairs, lambda drawn: _difference(drawn, statistic), seed=seed, num_resamples=num_resamples)


def resampled(
    values: Sequence[Value],
    statistic: Callable[[Sequence[Value]], float],
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> Difference | None:
    """A statistic of values that are differences (or pairs) themselves, or None without any."""
    if not values:
        return None
    value = statistic(values)
    if len(values) < MIN_PAIRS:
        return Difference(value=value, low=None, high=None, num_pairs=len(values))
    generator = random.Random(seed)
    drawn = [statistic(generator.choices(values, k=len(values))) for _ in range(num_resamples)]
    return Difference(value=value, low=percentile(drawn, 2.5), high=percentile(drawn, 97.5), num_pairs=len(values))


def _difference(pairs: Sequence[tuple[Value, Value]], statistic: Callable[[Sequence[Value]], float]) -> float:
    return statistic([second for _, second in pairs]) - statistic([first for first, _ in pairs])
