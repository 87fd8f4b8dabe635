"""The table a person reads, and the JSON for machines. Pure: a result in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import msgspec

from gateway.bench.cells import LINE_WIDTH, fact_line, number, percent, times
from gateway.bench.columns import Columns
from gateway.bench.engines.figures import FIGURES, Figure
from gateway.bench.engines.results import BenchResult, EngineRun, bounds, drift, pooled_median, ratio
from gateway.bench.engines.roofline import Bound

COLUMNS = Columns(label=46, unit=9, value=10, ratio=9)
RATIO_NOTE = (
    "x = how many times better kvgate is than the column before it (larger is always better), from the medians of all "
    "repeats of its runs before and after the peers; drift = second run against the first, which nothing but the "
    "machine can have changed"
)


def render(result: BenchResult) -> str:
    """Heading, table, roofline, and everything that has no figure with its reason."""
    parts = [heading(result), table(result), textwrap.fill(RATIO_NOTE, LINE_WIDTH), roofline(result), *reasons(result)]
    return "\n".join(part for part in parts if part) + "\n"


def to_json(result: BenchResult) -> str:
    """The raw values of every repeat, with medians, ratios and bounds."""
    document = {
        "result": result,
        "medians": dict(_medians(result)),
        "ratios": {run.name: {f.name: _ratio_to(result, f, run) for f in result.figures} for run in result.peer_runs},
        "bounds": {name: [_bound(one) for one in bounds(result, runs)] for name, runs in _by_engine(result)},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def heading(result: BenchResult) -> str:
    lines = ["kvgate bench"]
    lines += [fact_line(name, text) for name, text in result.facts.items()]
    if result.machine is not None:
        machine = result.machine
        speeds = (
            f"memory read {machine.memory_read_bytes_per_second / 1e9:.1f} GB/s, "
            f"bf16 products {machine.bf16_flops_per_second / 1e9:.0f} GFLOP/s ({machine.num_threads} threads)"
        )
        lines.append(fact_line("measured", speeds))
    quick = "; QUICK: small sizes, which say nothing about speed" if result.is_quick else ""
    lines.append(
        fact_line("requests", f"medians of {result.num_repeats} repeats, random ids, seed {result.seed}{quick}")
    )
    lines += [fact_line(run.name, describe(run)) for run in [*result.own_runs[:1], *result.peer_runs]]
    return "\n".join(lines)


def describe(run: EngineRun) -> str:
    """Version, served form, and what the server says of itself."""
    parts = [run.version, f"weights {run.weights}" if run.weights else "", run.note]
    parts += [f"{name.replace('_', ' ')} {value}" for name, value in run.facts.items() if value not in ("", None)]
    return ", ".join(part for part in parts if part)


def table(result: BenchResult) -> str:
    lines = [COLUMNS.line("", "", COLUMNS.titles(len(result.own_runs), _peer_names(result)))]
    for figure in result.figures:
        lines.append(COLUMNS.line(figure.text(result.sizes), figure.unit, list(_cells(result, figure))))
    return "\n".join(["", *lines, ""])


def _cells(result: BenchResult, figure: Figure) -> Iterable[tuple[str, int]]:
    own = result.own_runs
    for run in own[:2]:
        yield number(run.median(figure.name)), COLUMNS.value
    if len(own) > 1:
        yield percent(drift(result, figure.name)), COLUMNS.ratio
    for name in _peer_names(result):
        peer = next((run for run in result.peer_runs if run.name == name), None)
        yield number(peer.median(figure.name) if peer else None), COLUMNS.value
        yield times(_ratio_to(result, figure, peer) if peer else None), COLUMNS.ratio


def _peer_names(result: BenchResult) -> list[str]:
    """Missing ones too: an empty column says that there is something to compare with."""
    return [run.name for run in result.peer_runs] + list(result.missing)


def _ratio_to(result: BenchResult, figure: Figure, peer: EngineRun) -> float | None:
    return ratio(figure, pooled_median(result.own_runs, figure.name), peer.median(figure.name))


def roofline(result: BenchResult) -> str:
    """Per engine: what the machine allows with the weights in the form it serves."""
    labels = {figure.name: figure.text(result.sizes) for figure in FIGURES}
    lines = [
        f"  {name.ljust(12)}{labels[bound.figure].ljust(COLUMNS.label)}at most {bound.limit:8.1f} tok/s, reached "
        f"{bound.share * 100:5.1f} %  ({bound.explanation})"
        for name, runs in _by_engine(result)
        for bound in bounds(result, runs)
    ]
    return "\n".join(["", "roofline, from the measured speeds of this machine", *lines, ""]) if lines else ""


def _by_engine(result: BenchResult) -> list[tuple[str, list[EngineRun]]]:
    names = dict.fromkeys(run.name for run in result.runs)
    return [(name, [run for run in result.runs if run.name == name]) for name in names]


def _medians(result: BenchResult) -> Iterable[tuple[str, dict[str, float | None]]]:
    for name, runs in _by_engine(result):
        yield name, {figure.name: pooled_median(runs, figure.name) for figure in result.figures}


def _bound(bound: Bound) -> dict[str, object]:
    return {**msgspec.structs.asdict(bound), "share": bound.share}


def reasons(result: BenchResult) -> Iterable[str]:
    """Why a cell is empty."""
    for run in result.runs:
        if run.failure:
            yield f"FAILED: {run.name}: {run.failure}"
        for measure, problem in run.problems.items():
            yield f"failed: {run.name}, {measure}: {problem}"
        for measure, reason in run.unsupported.items():
            yield f"not measured: {run.name}, {measure}: {reason}"
    for name, reason in result.missing.items():
        yield f"missing: {name}: {reason}"
