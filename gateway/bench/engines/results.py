"""What a run measured, raw, and the figures drawn from it. Pure; knows no server and no terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from gateway.bench.cells import times_better
from gateway.bench.engines.figures import FIGURES, Figure
from gateway.bench.engines.roofline import (
    Bound,
    Footprint,
    Machine,
    ModelShape,
    decode_bound,
    prefill_bound,
)
from gateway.bench.engines.sizes import Sizes
from gateway.bench.memory import Memory


class EngineRun(Struct, kw_only=True):
    """One server from its start to its end."""

    name: str
    is_own: bool
    version: str
    command: list[str] = []
    weights: str = ""
    note: str = ""
    facts: dict[str, object] = {}  # what the server says of itself
    footprint: Footprint | None = None
    ready_seconds: float | None = None
    values: dict[str, list[float]] = {}  # figure -> one value per repeat
    memory: Memory | None = None
    problems: dict[str, str] = {}  # measure -> what went wrong
    unsupported: dict[str, str] = {}  # measure -> why this server has no way to do it
    failure: str = ""  # why the whole run has none

    def median(self, figure: str) -> float | None:
        values = self.values.get(figure)
        return statistics.median(values) if values else None


class BenchResult(Struct, kw_only=True):
    """Everything of one run of `kvgate bench`."""

    rows: list[str]
    num_repeats: int
    is_quick: bool
    seed: int
    sizes: Sizes
    machine: Machine | None
    shape: ModelShape | None
    facts: dict[str, str]  # processor, versions, commit
    runs: list[EngineRun] = []
    missing: dict[str, str] = {}  # peer -> how to install it

    @property
    def own_runs(self) -> list[EngineRun]:
        return [run for run in self.runs if run.is_own]

    @property
    def peer_runs(self) -> list[EngineRun]:
        return [run for run in self.runs if not run.is_own]

    @property
    def figures(self) -> list[Figure]:
        return [figure for figure in FIGURES if figure.measure in self.rows]

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong; what a peer has no way to do (`unsupported`) did not."""
        return any(run.failure or run.problems for run in self.runs)


def pooled_median(runs: Sequence[EngineRun], figure: str) -> float | None:
    """Over every repeat of every run, so that a drift between the runs counts on neither side."""
    values = [value for run in runs for value in run.values.get(figure, [])]
    return statistics.median(values) if values else None


def ratio(figure: Figure, own: float | None, peer: float | None) -> float | None:
    """How many times better the own value is, whichever direction is better. None where either is unknown or 0."""
    return times_better(own, peer, figure.better)


def drift(result: BenchResult, figure: str) -> float | None:
    """Second own run less the first, as a share of the first: what the machine alone changed meanwhile."""
    known = [value for run in result.own_runs if (value := run.median(figure)) is not None]
    return known[-1] / known[0] - 1 if len(known) > 1 and known[0] else None


def bounds(result: BenchResult, runs: Sequence[EngineRun]) -> list[Bound]:
    """Of one engine, over its runs, where machine and model are known."""
    machine, shape, sizes = result.machine, result.shape, result.sizes
    footprint = next((run.footprint for run in runs if run.footprint is not None), None)
    found: list[Bound] = []
    if machine is None:
        return found
    if footprint is not None:
        for figure, prompt, output in (
            ("decode", sizes.short_prompt, sizes.decode_output),
            ("decode-long", sizes.long_prompt, sizes.long_decode_output),
        ):
            reached = pooled_median(runs, figure)
            if reached is not None:
                found.append(decode_bound(figure, reached, footprint, prompt + output / 2, machine))
    if shape is not None:
        for figure, prompt in (("prefill", sizes.medium_prompt), ("prefill-long", sizes.long_prompt)):
            reached = pooled_median(runs, figure)
            if reached is not None:
                found.append(prefill_bound(figure, reached, shape, prompt, machine))
    return found
