"""The comparison itself: rounds, modes, warm-up, a closed loop of requests. Knows no terminal and no figures.

A pass is one mode in one round:
clear prefix caches, one warm-up request, (cold: clear again; warm: send every prompt once), new peaks, measure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backends.protocol.messages import Timings
from gateway.bench.client import GatewayClient, Refused, Unreachable
from gateway.bench.measure import Clock, Measurement, measure
from gateway.bench.options import CompareError, CompareOptions, Warmth
from gateway.bench.rows import Comparison, PassResult, Peaks, Process, RequestRow, ServedModel, roles_of
from gateway.bench.workload import PlannedRequest, mode_order, plan_round, plan_warm_up, token_id_range
from gateway.core.types import CacheMode

RECORD_TRIES = 5  # a record is written just after its stream has ended


class Progress(Protocol):
    """Somewhere to show how far the run is."""

    def begin(self, label: str, total: int) -> None: ...

    def advance(self, *, failed: bool) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Clocks:
    """Every source of time, so that tests are exact."""

    now: Clock = time.monotonic
    cpu: Clock = time.process_time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Runner:
    """Runs one comparison against one gateway."""

    def __init__(
        self, client: GatewayClient, options: CompareOptions, progress: Progress, clocks: Clocks | None = None
    ) -> None:
        self._client = client
        self._options = options
        self._progress = progress
        self._clocks = clocks or Clocks()
        self._notices: list[str] = []

    async def run(self) -> Comparison:
        """Every pass of every round. Raises CompareError where nothing could be compared honestly."""
        model = choose_model(await self._client.models(), self._options)
        comparison = Comparison(
            model=model,
            processes=await self._client.processes(),
            gateway_version=await self._client.version(),
            notices=self._notices,
        )
        ids = token_id_range(model.vocab_size or smallest_vocabulary(comparison.processes.values()))
        for round_index in range(self._options.num_rounds):
            planned = plan_round(self._options, model.id, round_index, ids)
            warm_up = plan_warm_up(self._options, model.id, round_index, ids)
            for mode in mode_order(self._options.modes, round_index):
                comparison.passes.append(await self._pass(mode, round_index, warm_up, planned))
        return comparison

    async def _pass(
        self, mode: CacheMode, round_index: int, warm_up: PlannedRequest, planned: Sequence[PlannedRequest]
    ) -> PassResult:
        """One mode in one round. A gateway that goes away leaves what was measured until then."""
        result = PassResult(mode=mode, round_index=round_index)
        try:
            await self._fill(result, warm_up, planned)
        except Unreachable as unreachable:
            result.failure = str(unreachable)
        result.num_not_sent = 0 if result.rows else len(planned)
        return result

    async def _fill(self, result: PassResult, warm_up: PlannedRequest, planned: Sequence[PlannedRequest]) -> None:
        options = self._options
        measurement = Measurement(
            self._client, result.mode, self._clocks.now, options.timeout_seconds, options.output_tokens
        )
        result.failure = await self._prepare(measurement, warm_up, planned)
        if result.failure:
            return
        await self._measure(measurement, planned, result)
        result.peaks = await self._peaks(result.mode)
        await self._add_timings(result.rows)

    async def _prepare(
        self, measurement: Measurement, warm_up: PlannedRequest, planned: Sequence[PlannedRequest]
    ) -> str:
        """Bring engine and caches into the state that is stated; returns why that failed, or nothing."""
        await self._reset(clear_prefix_cache=True)
        first = await measure(measurement, warm_up, intended_at=0.0)
        if not first.is_ok:
            return f"the warm-up request failed: {first.error}"
        if self._options.warmth is Warmth.COLD:
            await self._reset(clear_prefix_cache=True)
            return ""
        for row in await self._closed_loop(measurement, planned, f"{measurement.mode} priming"):
            if not row.is_ok:
                return f"a priming request failed: {row.error}"
        await self._reset(clear_prefix_cache=False)
        return ""

    async def _measure(self, measurement: Measurement, planned: Sequence[PlannedRequest], result: PassResult) -> None:
        started_at, cpu_started_at = self._clocks.now(), self._clocks.cpu()
        label = f"{measurement.mode} round {result.round_index + 1}/{self._options.num_rounds}"
        result.rows = await self._closed_loop(replace(measurement, pass_started_at=started_at), planned, label)
        result.client_cpu_seconds = self._clocks.cpu() - cpu_started_at
        result.wall_seconds = max((row.ended_at_seconds for row in result.rows), default=0.0)

    async def _closed_loop(
        self, measurement: Measurement, planned: Sequence[PlannedRequest], label: str
    ) -> list[RequestRow]:
        """Keep `concurrency` requests in flight; the next is intended the moment a place becomes free."""
        rows: list[RequestRow] = []
        waiting = iter(planned)
        self._progress.begin(label, len(planned))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._options.concurrency, len(planned))):
                    group.create_task(self._lane(measurement, waiting, rows))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it
        finally:
            self._progress.end()
        return sorted(rows, key=lambda row: row.index)

    async def _lane(self, measurement: Measurement, waiting: Iterator[PlannedRequest], rows: list[RequestRow]) -> None:
        for planned in waiting:
            row = await measure(measurement, planned, intended_at=self._clocks.now())
            rows.append(row)
            self._progress.advance(failed=not row.is_ok)

    async def _reset(self, *, clear_prefix_cache: bool) -> None:
        try:
            await self._client.reset_peaks(clear_prefix_cache=clear_prefix_cache)
        except Refused as refused:
            self._refused(refused, "peaks cover more than the measured requests, and prefix caches were not cleared")

    async def _peaks(self, mode: CacheMode) -> dict[str, Peaks]:
        try:
            peaks = await self._client.peaks()
        except Refused as refused:
            self._refused(refused, "peaks are not known")
            return {}
        silent = [role for role in roles_of(mode) if role not in peaks]
        if silent:
            self._notice(f"{' and '.join(silent)} gave no figures after a pass: their peaks are not of every round")
        return peaks

    def _refused(self, refused: Refused, consequence: str) -> None:
        """A gateway without this door can still be timed; one that refuses the key can't be asked anything."""
        if refused.status in {401, 403}:
            raise refused
        self._notice(f"{str(refused).rstrip('.')}: {consequence}")

    def _notice(self, notice: str) -> None:
        if notice not in self._notices:
            self._notices.append(notice)

    async def _add_timings(self, rows: Sequence[RequestRow]) -> None:
        """After the pass, so that the questions don't disturb what is measured."""
        tries = RECORD_TRIES
        for row in rows:
            if row.is_ok and row.request_id:
                row.timings = await self._timings(row.request_id, tries)
                tries = RECORD_TRIES if row.timings else 1  # a gateway that keeps none is not waited for again
        missing = sum(1 for row in rows if row.is_ok and row.timings is None)
        if missing:
            self._notices.append(
                f"{rows[0].mode} round {rows[0].round_index + 1}: {missing} requests without a record at the gateway; "
                "the breakdown leaves them out"
            )

    async def _timings(self, request_id: str, tries: int) -> Timings | None:
        for attempt in range(tries):
            if attempt:
                await self._clocks.sleep(0.05)
            timings = await self._client.timings(request_id)
            if timings is not None:
                return timings
        return None


def smallest_vocabulary(processes: Iterable[Process]) -> int | None:
    return min((process.vocab_size for process in processes if process.vocab_size), default=None)


def choose_model(models: Sequence[ServedModel], options: CompareOptions) -> ServedModel:
    """The model asked for, or the first that serves every mode; refused where the answer can't fit its context."""
    wanted = {mode.value for mode in options.modes}
    fitting = [model for model in models if wanted <= set(model.modes)]
    if options.model is not None:
        named = [model for model in models if model.id == options.model]
        if not named:
            known = ", ".join(model.id for model in models) or "none"
            raise CompareError(f"model {options.model!r} is not served here. Available: {known}.")
        if named[0].modes and named[0] not in fitting:
            raise CompareError(f"model {options.model!r} is served in {', '.join(named[0].modes)} only")
        fitting = named
    if not fitting:
        raise CompareError(f"no model here serves {' and '.join(sorted(wanted))}; name one with --model")
    model = fitting[0]
    length = options.prompt_tokens + options.output_tokens
    if options.prompt_text is None and model.max_model_len is not None and length > model.max_model_len:
        raise CompareError(
            f"{options.prompt_tokens} prompt and {options.output_tokens} output tokens exceed "
            f"the {model.max_model_len} that {model.id} takes"
        )
    return model
