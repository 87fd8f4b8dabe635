"""One step of an engine: schedule, compute, take in. Knows neither text nor who asked; every engine uses it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)

LayerCallback = Callable[[int], None]
# Asked once a step, before anything is computed: what to call as soon as a layer's new KV is in the cache.
LayerHook = Callable[[SchedulerOutput], LayerCallback | None]


class Runner(Protocol):
    """Computes a step: returns the next token of each request that samples in it, None for the others."""

    def execute(
        self, scheduled: Sequence[ScheduledRequest], *, on_layer: LayerCallback | None = None
    ) -> list[int | None]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. With `error`, the scheduled requests are gone from the scheduler and nothing was sampled.

    `first_scheduled` had never been scheduled before. `sampled` is parallel to `output.scheduled`.
    """

    output: SchedulerOutput
    sampled: tuple[int | None, ...] = ()
    first_scheduled: tuple[Request, ...] = ()
    error: Exception | None = None

    @property
    def idle(self) -> bool:
        return not self.output.scheduled


class Stepper:
    """Drives a scheduler and a runner, and stamps on requests when things happened."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self.num_steps = 0
        self.num_generated_tokens = 0

    def step(self, layer_hook: LayerHook | None = None) -> StepResult:
        """Advance by one step. A failure of the runner costs the requests of this step, not the engine."""
        output = self._scheduler.schedule()
        if not output.scheduled:
            return StepResult(output)
        first_scheduled = self._stamp_first(output)
        try:
            on_layer = layer_hook(output) if layer_hook is not None else None
            sampled = tuple(self._runner.execute(output.scheduled, on_layer=on_layer))
            _check_sampled(output, sampled)
        except Exception as error:
            logger.exception("a step of %d requests failed", len(output.scheduled))
            for item in output.scheduled:
                self._scheduler.finish(item.request)
            return StepResult(output, (), first_scheduled, error)
        self._stamp_tokens(output, sampled)
        self._scheduler.update_from_output(output, sampled)
        return StepResult(output, sampled, first_scheduled)

    def _stamp_first(self, output: SchedulerOutput) -> tuple[Request, ...]:
        now = self._clock()
        first = tuple(item.request for item in output.scheduled if item.request.first_scheduled_at is None)
        for request in first:
            request.first_scheduled_at = now
        return first

    def _stamp_tokens(self, output: SchedulerOutput, sampled: Sequence[int | None]) -> None:
        now = self._clock()
        self.num_steps += 1
        for item, token_id in zip(output.scheduled, sampled, strict=True):
            if token_id is None:
                continue
            self.num_generated_tokens += 1
            item.request.last_token_at = now
            if item.request.first_token_at is None:
                item.request.first_token_at = now


def _check_sampled(output: SchedulerOutput, sampled: Sequence[int | None]) -> None:
    expected = [item.samples for item in output.scheduled]
    if [token_id is not None for token_id in sampled] != expected:
        raise RuntimeError(f"the runner returned {list(sampled)} for requests that sample as {expected}")
