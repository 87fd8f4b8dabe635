"""Steps, and what follows for the answers: tokens told, ends, failures, deadlines. Merged and decode use it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.engines.outputs import OutputProcessor
from backends.engines.stepper import Stepper, StepResult
from backends.protocol.messages import FailureCode

logger = logging.getLogger(__name__)


class AnswerLoop:
    """Keeps a scheduler and the answers being written in agreement. Answers may exist that aren't scheduled yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        stepper: Stepper,
        outputs: OutputProcessor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._outputs = outputs
        self._clock = clock

    def step(self) -> StepResult:
        """One step; sampled tokens are emitted, and answers that ended are gone with their blocks."""
        result = self._stepper.step()
        self._outputs.observe_blocks_in_use(self._scheduler.manager.pool.num_blocks_in_use)
        if result.error is not None:
            for item in result.output.scheduled:
                message = f"The engine failed while computing this request: {result.error}"
                self._outputs.fail(item.request.request_id, "internal", message)
            return result
        for item, token_id in zip(result.output.scheduled, result.sampled, strict=True):
            if token_id is not None:
                self.tell(item.request)
        return result

    def expire(self) -> list[Request]:
        """Fail what has passed its deadline, free its blocks and return it."""
        now = self._clock()
        expired = [
            request
            for request in self._outputs.requests()
            if request.deadline_at is not None and request.deadline_at <= now
        ]
        for request in expired:
            allowed = (request.deadline_at or now) - request.arrived_at
            num_tokens = len(request.output_token_ids)
            message = (
                f"The request took longer than the {allowed:g} seconds allowed; {num_tokens} tokens were generated."
            )
            self.fail(request.request_id, "timeout", message)
        return expired

    def next_deadline(self) -> float | None:
        deadlines = (request.deadline_at for request in self._outputs.requests())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def abort(self, request_id: str) -> None:
        """Forget a request in whatever state; nothing more is emitted for it. Unknown ids are ignored."""
        self._outputs.drop(request_id)
        self._scheduler.abort(request_id)

    def fail(self, request_id: str, code: FailureCode, message: str) -> None:
        """End a request in whatever state by `Failed` and free its blocks."""
        self._outputs.fail(request_id, code, message)
        self._scheduler.abort(request_id)

    def tell(self, request: Request) -> bool:
        """Emit what its newest token says. True: that ended the answer, and it is gone with its blocks."""
        try:
            ended = self._outputs.process(request)
        except Exception as error:  # text of one answer can't be made: that answer's trouble alone
            logger.exception("request %s: its output can't be told", request.request_id)
            self.fail(request.request_id, "internal", f"The engine failed while writing this answer: {error}")
            return True
        if ended:
            self._scheduler.finish(request)
        return ended
