"""The figures of the table, drawn from raw values. Pure; knows no server and no terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.bench.bootstrap import Difference, resampled
from gateway.bench.cells import Better, times_better
from gateway.bench.gateways.results import GatewayResult, GatewayRun, MemoryPoint, Pair
from gateway.bench.gateways.sizes import Kind, Sizes
from gateway.bench.percentiles import percentile

MIB, KIB = 2**20, 2**10
MIN_SLOPE_REQUESTS = 1000  # over fewer, one freed or taken page looks like growth
ROWS = ("latency", "rate", "memory", "streams")

Statistic = Callable[[Sequence[float]], float]
ValuesOf = Callable[[GatewayRun], list[float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: the statistic of a run's values. `label` may name sizes, such as {num_streams}."""

    name: str
    row: str  # what `--rows` selects
    label: str
    unit: str
    better: Better | None  # None: no ratio would mean anything
    values: ValuesOf
    statistic: Statistic = statistics.median

    def text(self, sizes: Sizes) -> str:
        return self.label.format(**{name: format(getattr(sizes, name), ",") for name in sizes.__slots__})


def p50(values: Sequence[float]) -> float:
    return percentile(values, 50)


def p95(values: Sequence[float]) -> float:
    return percentile(values, 95)


def added(kind: Kind, of: Callable[[Pair], float]) -> ValuesOf:
    """Milliseconds that the gateway's request took more than the direct one beside it."""
    return lambda run: [of(pair) * 1000 for pair in run.pairs.get(kind, [])]


def _first(pair: Pair) -> float:
    return pair.via_first - pair.direct_first


def _whole(pair: Pair) -> float:
    return pair.via_whole - pair.direct_whole


def _latencies() -> Iterable[Figure]:
    names: tuple[tuple[Kind, str, str, Callable[[Pair], float]], ...] = (
        (Kind.STREAM, "first", "added to the first token, stream", _first),
        (Kind.STREAM, "whole", "added in all, stream of {num_chunks} chunks", _whole),
        (Kind.PLAIN, "first", "added to the first byte, plain", _first),
        (Kind.PLAIN, "whole", "added in all, plain", _whole),
    )
    for kind, what, label, of in names:
        for share, statistic in (("p50", p50), ("p95", p95)):
            name = f"{what}-{kind}-{share}"
            yield Figure(name, "latency", f"{label}, {share}", "ms", "less", added(kind, of), statistic)


def _rates() -> Iterable[Figure]:
    for kind in (Kind.STREAM, Kind.PLAIN):
        yield Figure(f"rate-{kind}", "rate", f"{kind} at {{num_lanes}} at once", "req/s", "more", _via_rates(kind))
        yield Figure(f"rate-{kind}-direct", "rate", "  in the same rounds, direct", "req/s", None, _direct_rates(kind))


def _via_rates(kind: Kind) -> ValuesOf:
    return lambda run: [one.via for one in run.rounds.get(kind, [])]


def _direct_rates(kind: Kind) -> ValuesOf:
    return lambda run: [one.direct for one in run.rounds.get(kind, [])]


def slope_kib(points: Sequence[MemoryPoint]) -> float | None:
    """KiB that 1,000 more requests add, by least squares over the later half: the first fills caches once."""
    late = points[len(points) // 2 :]
    if len(late) < 3 or late[-1].num_requests - late[0].num_requests < MIN_SLOPE_REQUESTS:
        return None
    thousands = [point.num_requests / 1000 for point in late]
    slope, _ = statistics.linear_regression(thousands, [point.rss_bytes / KIB for point in late])
    return slope


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def _memory(of: Callable[[Sequence[MemoryPoint]], float | None]) -> ValuesOf:
    return lambda run: _known(of(run.memory)) if run.memory else []


def _burst_seconds(run: GatewayRun) -> list[float]:
    """Of a burst without errors: one that refuses streams would look fast."""
    return [] if run.burst is None or run.burst.num_errors else [run.burst.seconds]


def _direct_burst(run: GatewayRun) -> list[float]:
    return [run.direct_burst.seconds] if run.direct_burst else []


def _lag_milliseconds(run: GatewayRun) -> list[float]:
    return [] if run.lag_p99_seconds is None else [run.lag_p99_seconds * 1000]


FIGURES: tuple[Figure, ...] = (
    *_latencies(),
    *_rates(),
    Figure(
        "memory", "memory", "resident memory, all processes", "MiB", "less", _memory(lambda p: p[0].rss_bytes / MIB)
    ),
    Figure(
        "memory-more",
        "memory",
        "  after {num_memory_requests} more requests",
        "MiB",
        "less",
        _memory(lambda p: p[-1].rss_bytes / MIB),
    ),
    Figure("memory-slope", "memory", "  growth per 1,000 requests by then", "KiB", None, _memory(slope_kib)),
    Figure(
        "streams-errors",
        "streams",
        "{num_streams} streams at once: errors",
        "",
        None,
        lambda run: [float(run.burst.num_errors)] if run.burst else [],
    ),
    Figure(
        "streams-open",
        "streams",
        "  most of them open at the upstream",
        "",
        None,
        lambda run: [float(run.burst.max_open)] if run.burst else [],
    ),
    Figure("streams-seconds", "streams", "  until the last had ended", "s", "less", _burst_seconds),
    Figure("streams-direct", "streams", "  the same, direct", "s", None, _direct_burst),
    Figure("streams-lag", "streams", "  event-loop lag p99, by its own metrics", "ms", None, _lag_milliseconds),
)


def estimate(figure: Figure, runs: Sequence[GatewayRun], seed: int) -> Difference | None:
    """Over the values of all the runs, so that a drift between them counts on neither side."""
    values = [value for run in runs for value in figure.values(run)]
    return resampled(values, figure.statistic, seed=seed)


def value_of(figure: Figure, runs: Sequence[GatewayRun]) -> float | None:
    values = [value for run in runs for value in figure.values(run)]
    return figure.statistic(values) if values else None


def ratio_to(result: GatewayResult, figure: Figure, peer: GatewayRun) -> float | None:
    """How many times better this project is. None where no time was added: then there is nothing to divide by."""
    if figure.better is None:
        return None
    own, other = value_of(figure, result.own_runs), value_of(figure, [peer])
    return times_better(own, other, figure.better) if (own or 0) > 0 and (other or 0) > 0 else None


def drift(result: GatewayResult, figure: Figure) -> float | None:
    """Second own run less the first, as a share of the first: what the machine alone changed meanwhile."""
    known = [value for run in result.own_runs if (value := value_of(figure, [run])) is not None]
    return known[-1] / known[0] - 1 if len(known) > 1 and known[0] > 0 else None


def figures_of(result: GatewayResult) -> list[Figure]:
    return [figure for figure in FIGURES if figure.row in result.rows]
