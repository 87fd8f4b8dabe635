"""The merged engine: one instance computes prompts and answers, mixed in the same steps. Knows no sockets, no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.engines.admission import accepted, check_new
from backends.engines.answer_loop import AnswerLoop
from backends.engines.base import Emit
from backends.engines.outputs import OutputProcessor
from backends.engines.stats import MemoryProbe, engine_stats, reset_peaks
from backends.engines.stepper import Stepper
from backends.protocol.messages import EngineInfo, EngineStats

logger = logging.getLogger(__name__)


class MergedEngine:
    """Implements `backends.engines.base.Engine`."""

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        stepper: Stepper,
        outputs: OutputProcessor,
        memory: MemoryProbe,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._stepper = stepper
        self._outputs = outputs
        self._memory = memory
        self._emit = emit
        self._loop = AnswerLoop(scheduler, stepper, outputs, clock=clock)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: Request) -> None:
        """Queue a request and emit `Accepted`, or raise `RequestRefused`."""
        check_new(request, in_use=request.request_id in self._outputs)
        self._scheduler.add(request)
        try:
            self._outputs.add(request)
        except BaseException:
            self._scheduler.finish(request)
            raise
        self._emit(accepted(request))

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    def step(self) -> bool:
        """Advance by one step. False: there is no work at all."""
        self._loop.expire()
        result = self._loop.step()
        if result.idle and self._scheduler.has_work:
            self._fail_stuck()
            return True
        return not result.idle

    def next_deadline(self) -> float | None:
        return self._loop.next_deadline()

    def stats(self) -> EngineStats:
        num_generated = self._stepper.num_generated_tokens
        return engine_stats(self._scheduler, self._stepper, self._memory, num_generated_tokens=num_generated)

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        reset_peaks(self._scheduler, self._memory, clear_prefix_cache=clear_prefix_cache)

    def num_unfinished(self) -> int:
        return len(self._outputs)

    def close(self) -> None:
        """Forget all requests; nothing more is emitted."""
        for request in self._outputs.requests():
            self._loop.abort(request.request_id)

    def _fail_stuck(self) -> None:
        """The scheduler's rules let some request advance in every step. If none does, a request is better
        refused than all of them left hanging.
        """
        request = next(self._scheduler.requests())
        logger.error("nothing could be scheduled; giving up request %s", request.request_id)
        self._loop.fail(request.request_id, "internal", "The engine could not schedule this request.")
