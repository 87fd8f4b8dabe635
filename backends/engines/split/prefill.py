"""The prefill side: computes prompts and puts their KV into the decode side's blocks. Knows no sockets, no text.

A request's own blocks stay held until every copy out of them has ended; afterwards they are ordinary free blocks that
the prefix cache can find. Nothing is answered while a copy for that request may still be running.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from backends.core.errors import RequestRefused
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import SchedulerOutput
from backends.engines.base import EmitPeer
from backends.engines.split.pairing import pairing_refusal
from backends.engines.split.prefill_work import PrefillWork, check_blocks
from backends.engines.stats import MemoryProbe, engine_stats, reset_peaks
from backends.engines.stepper import LayerCallback, Stepper, StepResult
from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.pool import Part, TransferPool
from backends.protocol.messages import (
    PROTOCOL_VERSION,
    CancelPrefill,
    EngineInfo,
    EngineStats,
    FailureCode,
    FromPrefill,
    Pair,
    Prefill,
    PrefillFailed,
    PrefillStarted,
    Released,
    ToPrefill,
)

logger = logging.getLogger(__name__)

# Maps a decode side's KV memory, given its descriptor (the caller's) and size.
Connect = Callable[[int, int], KVConnector]


@dataclass(frozen=True, slots=True)
class _Peer:
    """The paired decode side."""

    info: EngineInfo
    emit: EmitPeer
    pool: TransferPool


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
        self._peer: _Peer | None = None
        self._work: dict[str, PrefillWork] = {}
        self._transferred_bytes = 0  # by earlier pairings

    @property
    def info(self) -> EngineInfo:
        return self._info

    def pair(
        self,
        info: EngineInfo,
        kv_memory_fd: int,
        kv_memory_bytes: int,
        emit: EmitPeer,
        *,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> str | None:
        """Map the decode side's memory, or say why not. The descriptor stays the caller's."""
        self.unpair()
        reason = pairing_refusal(info, self._info, kv_memory_bytes=kv_memory_bytes, protocol_version=protocol_version)
        if reason is not None:
            return reason
        try:
            connector = self._connect(kv_memory_fd, kv_memory_bytes)
        except (OSError, ValueError) as error:
            return f"The decode instance's KV memory can't be mapped: {error}"
        pool = TransferPool(connector, max_in_flight=self._max_transfer_concurrency, wake=self._wake)
        self._peer = _Peer(info, emit, pool)
        return None

    def unpair(self) -> None:
        """Drop everything of the decode side; on return no copy runs and its memory isn't mapped any more."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        for work in list(self._work.values()):
            self._drop(work, peer.pool)
        peer.pool.close()
        self._transferred_bytes += peer.pool.transferred_bytes

    def peer_message(self, message: ToPrefill) -> None:
        """What the decode side asks; what comes after it is gone has no effect."""
        if self._peer is None:
            return
        match message:
            case Prefill():
                self._begin(message, self._peer)
            case CancelPrefill(request_id=request_id):
                self._cancel(request_id, self._peer)
            case Pair():
                logger.warning("a decode side that is paired already sent another Pair")

    def step(self) -> bool:
        """Answer what is through, and compute one step. False: nothing to do until a message or `wake`."""
        if self._peer is None:
            return False
        answered = self._answer_finished(self._peer)
        result = self._stepper.step(self._before_compute)
        self._observe_blocks_in_use()
        if result.error is not None:
            self._fail_step(result, result.error, self._peer)
        else:
            self._take_sampled(result, self._peer)
        answered |= self._answer_finished(self._peer)
        return answered or not result.idle

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        transferred = self._transferred_bytes + (self._peer.pool.transferred_bytes if self._peer else 0)
        return engine_stats(
            self._scheduler, self._stepper, self._memory, num_generated_tokens=0, transferred_bytes=transferred
        )

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        reset_peaks(self._scheduler, self._memory, clear_prefix_cache=clear_prefix_cache)

    def num_unfinished(self) -> int:
        return len(self._work)

    def close(self) -> None:
        self.unpair()

    def _begin(self, message: Prefill, peer: _Peer) -> None:
        try:
            if message.request_id in self._work:
                raise RequestRefused("internal", f"Request id {message.request_id!r} is being prefilled already.")
            check_blocks(message, block_size=self._info.block_size, num_peer_blocks=peer.info.num_blocks)
            work = PrefillWork.begin(message, at=self._clock())
            self._scheduler.add(work.request)
        except RequestRefused as refused:
            self._fail(message.request_id, refused.code, str(refused), peer)
            return
        self._work[message.request_id] = work

    def _cancel(self, request_id: str, peer: _Peer) -> None:
        work = self._work.get(request_id)
        if work is None:
            return  # answered already
        self._drop(work, peer.pool)
        peer.emit(Released(request_id=request_id))

    def _drop(self, work: PrefillWork, pool: TransferPool) -> None:
        """Forget a request in whatever state. Its copies end first: only then may either side reuse the blocks."""
        pool.cancel(work.transfer)
        self._scheduler.abort(work.request.request_id)
        self._scheduler.manager.pool.free(work.held)
        del self._work[work.request.request_id]

    def _fail(self, request_id: str, code: FailureCode, message: str, peer: _Peer) -> None:
        logger.warning("prefill of request %s failed: %s", request_id, message)
        peer.emit(PrefillFailed(request_id=request_id, code=code, message=message))

    def _before_compute(self, output: SchedulerOutput) -> LayerCallback | None:
        """Start what can be copied already, and say what to copy after each layer."""
        peer = self._peer
        assert peer is not None
        for request in output.preempted:  # its blocks may be written to in this very step
            peer.pool.wait_done(self._work[request.request_id].transfer)
        parts: list[Part] = []
        for item in output.scheduled:
            work = self._work[item.request.request_id]
            self._announce(work, peer)
            if work.mode == "layer":
                parts += work.send_computed(item, peer.pool)
        if not parts:
            return None
        return lambda layer: peer.pool.submit_computed(layer, parts)

    def _announce(self, work: PrefillWork, peer: _Peer) -> None:
        if work.started:
            return
        work.started = True
        request = work.request
        assert request.first_scheduled_at is not None
        cached_tokens = request.num_cached_tokens or 0
        peer.emit(
            PrefillStarted(request_id=request.request_id, at=request.first_scheduled_at, cached_tokens=cached_tokens)
        )

    def _fail_step(self, result: StepResult, error: Exception, peer: _Peer) -> None:
        for item in result.output.scheduled:
            self._drop(self._work[item.request.request_id], peer.pool)
            message = f"The prefill instance failed while computing this prompt: {error}"
            self._fail(item.request.request_id, "internal", message, peer)

    def _take_sampled(self, result: StepResult, peer: _Peer) -> None:
        """A prompt that is computed leaves the scheduler; its blocks stay held for the copies."""
        for item, token_id in zip(result.output.scheduled, result.sampled, strict=True):
            if token_id is None:
                continue
            work = self._work[item.request.request_id]
            work.token_id = token_id
            work.held = list(item.request.blocks)
            self._scheduler.manager.pool.touch(work.held)
            self._scheduler.finish(item.request)
            work.send_rest(peer.pool)

    def _observe_blocks_in_use(self) -> None:
        num_blocks = self._scheduler.manager.pool.num_blocks_in_use
        for work in self._work.values():
            work.peak_kv_blocks = max(work.peak_kv_blocks, num_blocks)

    def _answer_finished(self, peer: _Peer) -> bool:
        answers: list[FromPrefill] = []
        for work in list(self._work.values()):
            if work.transfer.error is not None:
                self._drop(work, peer.pool)
                message = f"The prompt's KV could not be copied to the decode instance: {work.transfer.error}"
                answers.append(
                    PrefillFailed(request_id=work.request.request_id, code="transfer_failed", message=message)
                )
            elif work.token_id is not None and peer.pool.is_done(work.transfer):
                self._drop(work, peer.pool)
                answers.append(work.prefilled(self._memory.read().peak_memory_bytes))
        for answer in answers:
            peer.emit(answer)
        return bool(answers)
