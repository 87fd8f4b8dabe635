"""Percentiles of measured values. Pure; knows nothing of requests.

The method is linear interpolation between the two nearest ranks, numpy's default: the value at position
`share / 100 * (n - 1)` of the sorted values. With few values a high percentile is therefore close to the maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent of `values` lie. Refuses an empty list: there is no such value."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= share <= 100:
        raise ValueError(f"share must lie in 0..100, got {share}")
    ordered = sorted(values)
    position = share / 100 * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentile_or_none(values: Iterable[float | None], share: float) -> float | None:
    """The percentile of the values that exist, or None where none does."""
    known = [value for value in values if value is not None]
    return percentile(known, share) if known else None
