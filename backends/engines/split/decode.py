"""The decode side: owns every split request from its admission to its last token. Knows no sockets.

What may happen to a request is decided by `Handoff` and carried out by `HandoffEffects`; this module tells them what
happened, and starts prefills while there is room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

import msgspec

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import Reservation
from backends.engines.admission import accepted, check_new
from backends.engines.answer_loop import AnswerLoop
from backends.engines.base import Emit, PeerLink
from backends.engines.outputs import OutputProcessor
from backends.engines.split.admission import check_queue
from backends.engines.split.events import (
    BlocksReserved,
    DecodeFinished,
    PeerConnected,
    PeerHung,
    PeerLost,
    PrefillDone,
    PrefillFailure,
    PrefillReleased,
    Submitted,
    TimePassed,
    Unplaceable,
)
from backends.engines.split.handoff import NO_PEER, Handoff, Phase
from backends.engines.split.handoff_effects import HandoffEffects
from backends.engines.split.peer import PeerId
from backends.engines.split.prefill_report import PrefillReports
from backends.engines.split.prefill_sides import PrefillSides
from backends.engines.stats import MemoryProbe, engine_stats, reset_peaks
from backends.engines.stepper import Stepper
from backends.kv_transfer.base import KVMemory
from backends.protocol.messages import (
    EngineInfo,
    EngineStats,
    FromPrefill,
    Heartbeat,
    Pair,
    Paired,
    PairRefused,
    Prefilled,
    PrefillFailed,
    PrefillStarted,
    Released,
    TransferMode,
)

logger = logging.getLogger(__name__)

DEFAULT_LEASE_SECONDS = 10.0


class DecodeEngine:
    """Implements `backends.engines.base.SplitDecodeEngine`.

    `outputs` completes its timings from the same `reports`.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        scheduler: Scheduler,
        stepper: Stepper,
        outputs: OutputProcessor,
        reports: PrefillReports,
        memory: MemoryProbe,
        kv_memory: KVMemory,
        emit: Emit,
        max_num_seqs: int,
        max_waiting: int,
        transfer_mode: TransferMode,
        handoff_timeout_seconds: float,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._stepper = stepper
        self._outputs = outputs
        self._reports = reports
        self._memory = memory
        self._kv_memory = kv_memory
        self._emit = emit
        self._max_waiting = max_waiting
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._loop = AnswerLoop(scheduler, stepper, outputs, clock=clock)
        self._handoff = Handoff(max_active=max_num_seqs, timeout_seconds=handoff_timeout_seconds)
        self._lease_seconds = lease_seconds
        self._sides = PrefillSides(block_size=info.block_size, transfer_mode=transfer_mode)
        self._effects = HandoffEffects(
            self._handoff, scheduler=scheduler, outputs=outputs, loop=self._loop, reports=reports, sides=self._sides
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def kv_memory_fd(self) -> int:
        return self._kv_memory.fd

    def pair_message(self) -> Pair:
        """How it introduces itself to a prefill side."""
        return Pair(
            info=self._info,
            kv_memory_bytes=self._kv_memory.num_bytes,
            transfer_backend=self._kv_memory.backend,
            kv_memory_metadata=self._kv_memory.metadata,
            lease_seconds=self._lease_seconds,
        )

    def submit(self, request: Request) -> None:
        """Take a request and emit `Accepted`, or raise `RequestRefused`."""
        self._check(request)
        self._outputs.add(request)
        self._effects.keep(request)
        self._emit(accepted(request))
        self._effects.handle(Submitted(request.request_id, at=self._clock()))
        self._start_prefills()

    def abort(self, request_id: str) -> None:
        self._outputs.drop(request_id)
        self._effects.forget(request_id)
        self._start_prefills()

    def step(self) -> bool:
        """Advance by one step. False: nothing to do until a message or the next deadline."""
        self._expire()
        self._start_prefills()
        self._reports.step_started_at = self._clock()
        result = self._loop.step()
        if result.idle:
            return self._fail_stuck()
        ended_at = self._clock()
        for item in result.output.scheduled:
            request_id = item.request.request_id
            self._reports.decode_scheduled(request_id, ended_at=ended_at)
            if request_id not in self._outputs:
                self._reports.forget(request_id)
                self._effects.handle(DecodeFinished(request_id))
        return True

    def next_deadline(self) -> float | None:
        deadlines = (self._loop.next_deadline(), self._handoff.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def stats(self) -> EngineStats:
        counts = self._effects.counts
        num_generated = self._stepper.num_generated_tokens + counts.num_first_tokens
        return msgspec.structs.replace(
            engine_stats(self._scheduler, self._stepper, self._memory, num_generated_tokens=num_generated),
            decode_held_tokens=counts.num_held_tokens,
            transferred_tokens=counts.num_transferred_tokens,
        )

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        reset_peaks(self._scheduler, self._memory, clear_prefix_cache=clear_prefix_cache)

    def num_unfinished(self) -> int:
        """Requests with a client, and those whose blocks a prefill side hasn't let go of."""
        return len(self._outputs) + self._handoff.count(Phase.CANCELLING)

    def close(self) -> None:
        """Forget all requests and the KV memory; nothing more is emitted."""
        for request in self._outputs.requests():
            self._outputs.drop(request.request_id)
            self._effects.forget(request.request_id)
        self._kv_memory.close()

    def peer_connected(self, peer: PeerId, link: PeerLink, info: EngineInfo) -> None:
        self._sides.add(peer, link, info)
        self._effects.handle(PeerConnected(peer))

    def peer_hung(self, peer: PeerId, reason: str) -> None:
        """Nothing is expected of it any more. What it was lent stays held: it may still write."""
        self._effects.handle(PeerHung(peer, reason))
        self._start_prefills()

    def peer_lost(self, peer: PeerId, reason: str) -> None:
        """It is gone and writes no more."""
        self._effects.handle(PeerLost(peer, reason))
        self._sides.forget(peer)
        self._start_prefills()

    def peer_message(self, peer: PeerId, message: FromPrefill) -> None:
        match message:
            case Prefilled(request_id=request_id):
                self._sides.answered(peer, request_id, computed=True)
                if self._handoff.peer_of(request_id) == peer:
                    self._reports.add(message, at=self._clock())
                self._effects.handle(PrefillDone(request_id, peer))
            case PrefillFailed(request_id=request_id, code=code, message=text):
                self._sides.answered(peer, request_id, computed=False)
                self._effects.handle(PrefillFailure(request_id, peer, code, text))
            case Released(request_id=request_id):
                self._sides.answered(peer, request_id, computed=False)
                self._effects.handle(PrefillReleased(request_id, peer))
            case PrefillStarted() | Heartbeat() | Paired() | PairRefused():
                pass  # `Prefilled` says it all again; pairing and leases are the server's
            case _:
                assert_never(message)
        self._start_prefills()

    def _check(self, request: Request) -> None:
        request_id = request.request_id
        check_new(request, in_use=request_id in self._outputs or self._handoff.phase(request_id) is not None)
        self._scheduler.check_fits(request.num_prompt_tokens)
        if not self._handoff.connected:
            raise RequestRefused("peer_lost", NO_PEER)
        self._sides.check_fits(request, self._handoff.peers)
        seats = self._max_num_seqs - self._handoff.count(Phase.PREFILLING, Phase.DECODING, Phase.CANCELLING)
        check_queue(self._handoff.count(Phase.WAITING), max_waiting=self._max_waiting + max(0, seats))

    def _start_prefills(self) -> None:
        """Reserve blocks for waiting requests, in order, while there is room: this is the back-pressure."""
        while (request_id := self._handoff.next_waiting()) is not None:
            request = self._effects.kept(request_id)
            try:  # the sides that were there when it came may be gone
                self._sides.check_fits(request, self._handoff.peers)
            except RequestRefused as refused:
                self._effects.handle(Unplaceable(request_id, refused.code, str(refused)))
                continue
            reservation = self._scheduler.reserve(request)
            if reservation is None:
                return
            self._reserved(request, reservation)

    def _reserved(self, request: Request, reservation: Reservation) -> None:
        request_id, num_held = request.request_id, reservation.num_held_tokens
        self._kv_memory.prefault(reservation.block_ids[num_held // self._info.block_size :])
        self._reports.reserved(request_id, at=self._clock(), num_held_tokens=num_held)
        hashes = self._scheduler.manager.prompt_hashes(request)
        peer = self._sides.lend(request, reservation, hashes, self._handoff.peers)
        self._outputs.observe_blocks_in_use(self._scheduler.manager.pool.num_blocks_in_use)
        self._effects.handle(BlocksReserved(request_id, peer, reservation.block_ids))

    def _expire(self) -> None:
        for request in self._loop.expire():  # its own deadline, for the whole answer
            self._effects.forget(request.request_id)
        self._effects.handle(TimePassed(self._clock()))

    def _fail_stuck(self) -> bool:
        """Nothing can be scheduled. Blocks that a prefill side was lent will come back; without any, a request is
        better refused than all of them left hanging.
        """
        if self._sides.num_loans or not self._scheduler.has_work:
            return False
        request_id = next(self._scheduler.requests()).request_id
        logger.error("nothing could be scheduled; giving up request %s", request_id)
        self._loop.fail(request_id, "internal", "The decode instance could not schedule this request.")
        self._effects.forget(request_id)
        return True
