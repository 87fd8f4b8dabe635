"""A histogram that takes many values at once. An answer has a gap for each of its tokens, thousands of a long one.

The library's own takes a lock and looks through all bounds for every value, while every stream waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override


class BulkHistogram(Collector):
    """For the event loop's thread alone. Values and bounds have the same unit."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets` are finite upper bounds, ascending."""
        self._name, self._text, self.label_names = name, text, tuple(labels)
        self._bounds = tuple(buckets)
        self._bound_names = (*map(floatToGoString, self._bounds), "+Inf")
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}  # counts by bucket; the sum
        registry.register(self)

    def observe_all(self, labels: tuple[str, ...], values: Iterable[float]) -> None:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = ([0] * len(self._bound_names), [0.0])
        counts, total = series
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
            total[0] += value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """What the registry looks for to know the names; without it, it would collect."""
        return [HistogramMetricFamily(self._name, self._text, labels=self.label_names)]

    @override
    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        for labels, (counts, total) in self._series.items():
            cumulated = zip(self._bound_names, accumulate(counts), strict=True)
            family.add_metric(labels, buckets=list(cumulated), sum_value=total[0])
        yield family
