"""The prefill side: computes prompts and puts their KV into the decode sides' blocks. Knows no sockets, no text.

A request's own blocks stay held until every copy out of them has ended; afterwards they are ordinary free blocks that
the prefix cache can find. Nothing is answered while a copy for that request may still be running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import SchedulerOutput
from backends.engines.base import EmitPeer
from backends.engines.split.decode_side import DecodeSide
from backends.engines.split.pairing import pairing_refusal
from backends.engines.split.peer import PeerId
from backends.engines.split.prefill_work import PrefillWork
from backends.engines.stats import MemoryProbe, engine_stats, reset_peaks
from backends.engines.stepper import LayerCallback, Stepper, StepResult
from backends.kv_transfer.base import Connect
from backends.kv_transfer.pool import LayerwiseCopies, Part, TransferPool
from backends.protocol.messages import (
    CancelPrefill,
    EngineInfo,
    EngineStats,
    FailureCode,
    FromPrefill,
    Heartbeat,
    Pair,
    Prefill,
    PrefillFailed,
    PrefillStarted,
    Released,
    ToPrefill,
)

logger = logging.getLogger(__name__)


class PrefillEngine:
    """Implements `backends.engines.base.SplitPrefillEngine`.

    `wake` is called in other threads when copies have ended and `step` has an answer to give.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        stepper: Stepper,
        memory: MemoryProbe,
        connect: Connect,
        max_transfer_concurrency: int,
        transfer_backend: str = "local",
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._stepper = stepper
        self._memory = memory
        self._connect = connect
        self._max_transfer_concurrency = max_transfer_concurrency
        self._wake = wake
        self._clock = clock
        self._transfer_backend = transfer_backend
        self._sides: dict[PeerId, DecodeSide] = {}
        self._owners: dict[Request, tuple[PrefillWork, DecodeSide]] = {}  # of all work
        self._transferred_bytes = 0  # by earlier pairings

    @property
    def info(self) -> EngineInfo:
        return self._info

    def pair(self, peer: PeerId, pair: Pair, kv_memory_fd: int | None, emit: EmitPeer) -> str | None:
        """Map the decode side's memory, or say why not. The descriptor stays the caller's."""
        self.unpair(peer)
        reason = pairing_refusal(pair, self._info, transfer_backend=self._transfer_backend)
        if reason is not None:
            return reason
        try:
            connector = self._connect(pair, kv_memory_fd)
        except (OSError, ValueError) as error:
            return f"The decode instance's KV memory can't be mapped: {error}"
        pool = TransferPool(connector, max_in_flight=self._max_transfer_concurrency, wake=self._wake)
        self._sides[peer] = DecodeSide(peer, pair.info, emit, pool)
        return None

    def unpair(self, peer: PeerId) -> None:
        """Drop everything of the decode side; on return no copy runs and its memory isn't mapped any more."""
        side = self._sides.pop(peer, None)
        if side is None:
            return
        for work in list(side.work.values()):
            self._drop(work, side)
        side.pool.close()
        self._transferred_bytes += side.pool.transferred_bytes

    def peer_message(self, peer: PeerId, message: ToPrefill) -> None:
        """What a decode side asks; what comes after it is gone has no effect."""
        side = self._sides.get(peer)
        if side is None:
            return
        match message:
            case Prefill():
                self._begin(message, side)
            case CancelPrefill(request_id=request_id):
                self._cancel(request_id, side)
            case Pair():
                logger.warning("decode side %s is paired already and sent another Pair", peer.name)
            case Heartbeat():
                pass  # leases are the server's

    def step(self) -> bool:
        """Answer what is through, and compute one step. False: nothing to do until a message or `wake`."""
        answered = self._answer_finished()
        result = self._stepper.step(self._before_compute)
        self._observe_blocks_in_use()
        if result.error is not None:
            self._fail_step(result, result.error)
        else:
            self._take_sampled(result)
        answered |= self._answer_finished()
        return answered or not result.idle

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        transferred = self._transferred_bytes + sum(side.pool.transferred_bytes for side in self._sides.values())
        return engine_stats(
            self._scheduler, self._stepper, self._memory, num_generated_tokens=0, transferred_bytes=transferred
        )

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        reset_peaks(self._scheduler, self._memory, clear_prefix_cache=clear_prefix_cache)

    def num_unfinished(self) -> int:
        return len(self._owners)

    def close(self) -> None:
        for peer in list(self._sides):
            self.unpair(peer)

    def _begin(self, message: Prefill, side: DecodeSide) -> None:
        try:
            side.check(message)
            work = PrefillWork.begin(message, at=self._clock())
            self._scheduler.add(work.request)
        except RequestRefused as refused:
            self._fail(message.request_id, refused.code, str(refused), side)
            return
        side.work[message.request_id] = work
        self._owners[work.request] = (work, side)

    def _cancel(self, request_id: str, side: DecodeSide) -> None:
        work = side.work.get(request_id)
        if work is None:
            return  # answered already
        self._drop(work, side)
        side.emit(Released(request_id=request_id))

    def _drop(self, work: PrefillWork, side: DecodeSide) -> None:
        """Forget a request in whatever state. Its copies end first: only then may either side reuse the blocks."""
        side.pool.cancel(work.transfer)
        if work.request in self._scheduler:
            self._scheduler.finish(work.request)
        self._scheduler.manager.pool.free(work.held)
        del self._owners[work.request]
        del side.work[work.request.request_id]

    def _fail(self, request_id: str, code: FailureCode, message: str, side: DecodeSide) -> None:
        logger.warning("prefill of request %s failed: %s", request_id, message)
        side.emit(PrefillFailed(request_id=request_id, code=code, message=message))

    def _before_compute(self, output: SchedulerOutput) -> LayerCallback | None:
        """Start what can be copied already, and say what to copy after each layer."""
        for request in output.preempted:  # its blocks may be written to in this very step
            work, side = self._owners[request]
            side.pool.wait_done(work.transfer)
        parts: dict[TransferPool, list[Part]] = {}
        for item in output.scheduled:
            work, side = self._owners[item.request]
            self._announce(work, side)
            if work.mode == "layer" and (computed := work.send_computed(item, side.pool)):
                parts.setdefault(side.pool, []).extend(computed)
        return LayerwiseCopies(parts) if parts else None

    def _announce(self, work: PrefillWork, side: DecodeSide) -> None:
        if work.started:
            return
        work.started = True
        request = work.request
        assert request.first_scheduled_at is not None
        cached_tokens = request.num_cached_tokens or 0
        side.emit(
            PrefillStarted(request_id=request.request_id, at=request.first_scheduled_at, cached_tokens=cached_tokens)
        )

    def _fail_step(self, result: StepResult, error: Exception) -> None:
        for item in result.output.scheduled:
            work, side = self._owners[item.request]
            self._drop(work, side)
            message = f"The prefill instance failed while computing this prompt: {error}"
            self._fail(item.request.request_id, "internal", message, side)

    def _take_sampled(self, result: StepResult) -> None:
        """A prompt that is computed leaves the scheduler; its blocks stay held for the copies."""
        for item, token_id in zip(result.output.scheduled, result.sampled, strict=True):
            if token_id is None:
                continue
            work, side = self._owners[item.request]
            work.token_id = token_id
            work.held = list(item.request.blocks)
            self._scheduler.manager.pool.touch(work.held)
            self._scheduler.finish(item.request)
            work.send_rest(side.pool)

    def _observe_blocks_in_use(self) -> None:
        num_blocks = self._scheduler.manager.pool.num_blocks_in_use
        for work, _ in self._owners.values():
            work.peak_kv_blocks = max(work.peak_kv_blocks, num_blocks)

    def _answer_finished(self) -> bool:
        answered = False
        for work, side in list(self._owners.values()):
            answer = self._answer(work, side)
            if answer is not None:
                self._drop(work, side)
                side.emit(answer)
                answered = True
        return answered

    def _answer(self, work: PrefillWork, side: DecodeSide) -> FromPrefill | None:
        """What there is to say of it now, once it is through or can't be."""
        if work.transfer.error is not None:
            message = f"The prompt's KV could not be copied to the decode instance: {work.transfer.error}"
            return PrefillFailed(request_id=work.request.request_id, code="transfer_failed", message=message)
        if work.token_id is not None and side.pool.is_done(work.transfer):
            return work.prefilled(self._memory.read().peak_memory_bytes)
        return None
