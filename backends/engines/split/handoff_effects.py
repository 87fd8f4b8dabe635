"""Carries out what `Handoff` decides, on the scheduler, the answers and the prefill sides. Decides nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import Reservation
from backends.engines.answer_loop import AnswerLoop
from backends.engines.outputs import OutputProcessor
from backends.engines.split.events import (
    Aborted,
    DecodeFinished,
    Effect,
    Event,
    FailRequest,
    FreeBlocks,
    SendCancel,
    SendPrefill,
    StartDecode,
    StopDecode,
)
from backends.engines.split.handoff import Handoff
from backends.engines.split.prefill_report import PrefillReports
from backends.engines.split.prefill_sides import PrefillSides


@dataclass(slots=True)
class HandoffCounts:
    """Of all requests that began to decode."""

    num_first_tokens: int = 0
    num_held_tokens: int = 0  # of their prompts, on the decode side already
    num_transferred_tokens: int = 0


class HandoffEffects:
    """Keeps the requests that are not decoding yet; from then on they are the scheduler's."""

    def __init__(
        self,
        handoff: Handoff,
        *,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        loop: AnswerLoop,
        reports: PrefillReports,
        sides: PrefillSides,
    ) -> None:
        self._handoff = handoff
        self._scheduler = scheduler
        self._outputs = outputs
        self._loop = loop
        self._reports = reports
        self._sides = sides
        self._requests: dict[str, Request] = {}
        self.counts = HandoffCounts()

    def keep(self, request: Request) -> None:
        """Before the handoff is told of it."""
        self._requests[request.request_id] = request

    def kept(self, request_id: str) -> Request:
        return self._requests[request_id]

    def forget(self, request_id: str) -> None:
        """The request has no client any more."""
        self._drop(request_id)
        self.handle(Aborted(request_id))

    def handle(self, event: Event) -> None:
        for effect in self._handoff.handle(event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendPrefill(request_id, peer):
                self._sides.ask(peer, self._requests[request_id])
            case SendCancel(request_id, peer):
                self._sides.cancel(peer, request_id)
            case FreeBlocks(request_id, peer):
                self._scheduler.release(self._sides.take_back(peer, request_id))
            case StartDecode(request_id, peer):
                self._start_decode(self._requests.pop(request_id), self._sides.take_back(peer, request_id))
            case StopDecode(request_id):
                self._scheduler.abort(request_id)
            case FailRequest(request_id, code, message):
                self._drop(request_id)
                self._outputs.fail(request_id, code, message)
            case _:
                assert_never(effect)

    def _start_decode(self, request: Request, reservation: Reservation) -> None:
        """The request joins the running batch and its first token is told like any other; that may end the answer."""
        self._reports.apply(request)
        self.counts.num_first_tokens += 1
        self.counts.num_held_tokens += reservation.num_held_tokens
        self.counts.num_transferred_tokens += request.num_prompt_tokens - reservation.num_held_tokens
        self._scheduler.add_computed(request, reservation)
        if self._loop.tell(request):
            self._reports.forget(request.request_id)
            self.handle(DecodeFinished(request.request_id))

    def _drop(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._reports.forget(request_id)
