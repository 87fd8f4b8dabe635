"""How much time copies took, and how much of it while something was computed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]  # start, end; seconds on one clock


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by any of the intervals, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def overlapped_seconds(intervals: Iterable[Interval], window: Interval) -> float:
    """How much of the time covered by the intervals lies inside the window."""
    return covered_seconds(
        (max(start, window[0]), min(end, window[1]))
        for start, end in intervals
        if min(end, window[1]) > max(start, window[0])
    )
