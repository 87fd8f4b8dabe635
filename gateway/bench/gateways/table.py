"""The table a person reads, and the JSON for machines. Pure: a result in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import msgspec

from gateway.bench.bootstrap import Difference
from gateway.bench.cells import LINE_WIDTH, UNKNOWN, fact_line, number, percent, times
from gateway.bench.columns import Columns
from gateway.bench.gateways.figures import FIGURES, Figure, drift, estimate, figures_of, ratio_to
from gateway.bench.gateways.results import GatewayResult, GatewayRun

COLUMNS = Columns(label=43, unit=6, value=14, ratio=8)
NOTE = (
    "Below each value its 95 % bootstrap interval, where there are values enough. Added = the gateway's request less "
    "the direct one beside it. x = how many times better kvgate is than the column before it (larger is always "
    "better), from all values of its runs before and after the peers; drift = second run against the first, which "
    "nothing but the machine can have changed. Requests/s share the machine with client and upstream: direct is the "
    "most that can be seen."
)


def render(result: GatewayResult) -> str:
    """Heading, table, and everything that has no figure with its reason."""
    parts = [heading(result), table(result), textwrap.fill(NOTE, LINE_WIDTH), *reasons(result)]
    return "\n".join(part for part in parts if part) + "\n"


def to_json(result: GatewayResult) -> str:
    """Every raw value, with the figures, their intervals and the ratios."""
    figures = figures_of(result)
    document = {
        "result": result,
        "figures": {
            name: {figure.name: estimate(figure, runs, result.seed) for figure in figures}
            for name, runs in _by_gateway(result)
        },
        "ratios": {run.name: {f.name: ratio_to(result, f, run) for f in figures} for run in result.peer_runs},
        "drift": {figure.name: drift(result, figure) for figure in figures},
        "units": {figure.name: figure.unit for figure in FIGURES},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def heading(result: GatewayResult) -> str:
    sizes = result.sizes
    quick = "; QUICK: few requests, which say nothing about speed" if result.is_quick else ""
    requests = (
        f"{sizes.num_pairs:,} pairs direct/through of each kind in random order, {sizes.num_rounds} rounds of "
        f"{sizes.num_round_requests:,} at {sizes.num_lanes} at once, {sizes.num_memory_requests:,} for memory, "
        f"seed {result.seed}{quick}"
    )
    lines = ["kvgate bench gateway", *(fact_line(name, text) for name, text in result.facts.items())]
    lines.append(fact_line("requests", requests))
    lines += [fact_line(run.name, describe(run)) for run in [*result.own_runs[:1], *result.peer_runs]]
    return "\n".join(lines)


def describe(run: GatewayRun) -> str:
    ready = "" if run.ready_seconds is None else f"ready after {run.ready_seconds:.1f} s"
    return ", ".join(part for part in (run.version, run.note, ready) if part)


def table(result: GatewayResult) -> str:
    lines = [COLUMNS.line("", "", COLUMNS.titles(len(result.own_runs), _peer_names(result)))]
    for figure in figures_of(result):
        cells = list(_cells(result, figure))
        lines.append(COLUMNS.line(figure.text(result.sizes), figure.unit, [(text, width) for text, _, width in cells]))
        intervals = COLUMNS.line("", "", [(below, width) for _, below, width in cells])
        lines += [intervals] if intervals else []
    return "\n".join(["", *lines, ""])


def _cells(result: GatewayResult, figure: Figure) -> Iterable[tuple[str, str, int]]:
    """Each cell, what stands below it, and its width."""
    for run in result.own_runs[:2]:
        yield _value_cell(result, figure, run)
    if len(result.own_runs) > 1:
        yield percent(drift(result, figure)), "", COLUMNS.ratio
    for name in _peer_names(result):
        peer = next((run for run in result.peer_runs if run.name == name), None)
        yield _value_cell(result, figure, peer)
        yield times(ratio_to(result, figure, peer) if peer else None), "", COLUMNS.ratio


def _value_cell(result: GatewayResult, figure: Figure, run: GatewayRun | None) -> tuple[str, str, int]:
    estimated = estimate(figure, [run], result.seed) if run is not None else None
    return shown(figure, estimated), interval(estimated), COLUMNS.value


def shown(figure: Figure, estimated: Difference | None) -> str:
    """A figure without a unit is a count."""
    if estimated is None:
        return UNKNOWN
    return number(estimated.value) if figure.unit else f"{estimated.value:,.0f}"


def interval(estimated: Difference | None) -> str:
    if estimated is None or estimated.low is None or estimated.high is None:
        return ""
    return f"{number(estimated.low)}..{number(estimated.high)}"


def _peer_names(result: GatewayResult) -> list[str]:
    """Missing ones too: an empty column says that there is something to compare with."""
    return [run.name for run in result.peer_runs] + list(result.missing)


def _by_gateway(result: GatewayResult) -> list[tuple[str, list[GatewayRun]]]:
    names = dict.fromkeys(run.name for run in result.runs)
    return [(name, [run for run in result.runs if run.name == name]) for name in names]


def reasons(result: GatewayResult) -> Iterable[str]:
    """Why a cell is empty, and what failed."""
    for run in result.runs:
        if run.failure:
            yield f"FAILED: {run.name}: {run.failure}"
        for measure, problem in run.problems.items():
            yield f"FAILED: {run.name}, {measure}: {problem}"
        if run.burst is not None and run.burst.num_errors:
            yield f"FAILED: {run.name}, {run.burst.num_errors} of the streams at once, such as: {run.burst.first_error}"
        for measure, reason in run.unsupported.items():
            yield f"not measured: {run.name}, {measure}: {reason}"
    for name, reason in result.missing.items():
        yield f"missing: {name}: {reason}"
