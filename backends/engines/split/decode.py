"""The decode side: owns every split request from its admission to its last token. Knows no sockets.

What may happen to a request is decided by `Handoff`; this module carries the effects out on the scheduler, the answers
and the prefill side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import assert_never

from backends.core.block_pool import KVCacheBlock
from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.engines.admission import check_new
from backends.engines.answer_loop import AnswerLoop
from backends.engines.base import Emit, PeerLink
from backends.engines.outputs import OutputProcessor
from backends.engines.split.admission import check_fits_peer, check_queue, prefill_message
from backends.engines.split.events import (
    Aborted,
    BlocksReserved,
    DecodeFinished,
    Effect,
    Event,
    FailRequest,
    FreeBlocks,
    PeerConnected,
    PeerLost,
    PrefillDone,
    PrefillFailure,
    PrefillReleased,
    SendCancel,
    SendPrefill,
    StartDecode,
    StopDecode,
    Submitted,
    TimePassed,
)
from backends.engines.split.handoff import NO_PEER, Handoff, Phase
from backends.engines.split.prefill_report import PrefillReports
from backends.engines.stats import MemoryProbe, engine_stats, reset_peaks
from backends.engines.stepper import Stepper
from backends.kv_transfer.shared_memory import SharedKVMemory
from backends.protocol.messages import (
    Accepted,
    CancelPrefill,
    EngineInfo,
    EngineStats,
    FromPrefill,
    Paired,
    PairRefused,
    Prefilled,
    PrefillFailed,
    PrefillStarted,
    Released,
    TransferMode,
)

logger = logging.getLogger(__name__)


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
        kv_memory: SharedKVMemory,
        emit: Emit,
        max_num_seqs: int,
        max_waiting: int,
        transfer_mode: TransferMode,
        handoff_timeout_seconds: float,
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
        self._transfer_mode: TransferMode = transfer_mode
        self._clock = clock
        self._loop = AnswerLoop(scheduler, stepper, outputs, clock=clock)
        self._handoff = Handoff(max_active=max_num_seqs, timeout_seconds=handoff_timeout_seconds)
        self._link: PeerLink | None = None
        self._peer_info: EngineInfo | None = None
        self._requests: dict[str, Request] = {}  # not decoding yet
        self._blocks: dict[str, list[KVCacheBlock]] = {}  # that the prefill side may write to
        self._num_first_tokens = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def kv_memory_fd(self) -> int:
        return self._kv_memory.fd

    @property
    def kv_memory_bytes(self) -> int:
        return self._kv_memory.num_bytes

    def submit(self, request: Request) -> None:
        """Take a request and emit `Accepted`, or raise `RequestRefused`."""
        self._check(request)
        self._outputs.add(request)
        self._requests[request.request_id] = request
        self._emit(
            Accepted(
                request_id=request.request_id,
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                notices=request.notices,
            )
        )
        self._handle(Submitted(request.request_id, at=self._clock()))
        self._start_prefills()

    def abort(self, request_id: str) -> None:
        self._outputs.drop(request_id)
        self._forget(request_id)
        self._start_prefills()

    def step(self) -> bool:
        """Advance by one step. False: nothing to do until a message or the next deadline."""
        self._expire()
        self._start_prefills()
        self._reports.step_started_at = self._clock()
        result = self._loop.step()
        if result.idle:
            return self._fail_stuck()
        for item in result.output.scheduled:
            request_id = item.request.request_id
            self._reports.decode_scheduled(request_id)
            if request_id not in self._outputs:
                self._reports.forget(request_id)
                self._handle(DecodeFinished(request_id))
        return True

    def next_deadline(self) -> float | None:
        deadlines = (self._loop.next_deadline(), self._handoff.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def stats(self) -> EngineStats:
        num_generated = self._stepper.num_generated_tokens + self._num_first_tokens
        return engine_stats(self._scheduler, self._stepper, self._memory, num_generated_tokens=num_generated)

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        reset_peaks(self._scheduler, self._memory, clear_prefix_cache=clear_prefix_cache)

    def num_unfinished(self) -> int:
        """Requests with a client, and those whose blocks the prefill side hasn't let go of."""
        return len(self._outputs) + self._handoff.count(Phase.CANCELLING)

    def close(self) -> None:
        """Forget all requests and the KV memory; nothing more is emitted."""
        for request in self._outputs.requests():
            self._outputs.drop(request.request_id)
            self._forget(request.request_id)
        self._link = None
        self._kv_memory.close()

    def peer_connected(self, link: PeerLink, info: EngineInfo) -> None:
        if self._handoff.connected:
            self.peer_lost("another prefill instance took its place")
        self._link, self._peer_info = link, info
        self._handle(PeerConnected())

    def peer_lost(self, reason: str) -> None:
        """The prefill side is gone and writes no more."""
        self._link = None
        self._handle(PeerLost(reason))

    def peer_message(self, message: FromPrefill) -> None:
        match message:
            case Prefilled(request_id=request_id):
                if self._handoff.phase(request_id) is Phase.PREFILLING:
                    self._reports.add(message, at=self._clock())
                self._handle(PrefillDone(request_id))
            case PrefillFailed(request_id=request_id, code=code, message=text):
                self._handle(PrefillFailure(request_id, code, text))
            case Released(request_id=request_id):
                self._handle(PrefillReleased(request_id))
            case PrefillStarted() | Paired() | PairRefused():
                pass  # `Prefilled` says it all again; pairing is the server's
            case _:
                assert_never(message)
        self._start_prefills()

    def _check(self, request: Request) -> None:
        request_id = request.request_id
        check_new(request, in_use=request_id in self._outputs or self._handoff.phase(request_id) is not None)
        self._scheduler.check_fits(request.num_prompt_tokens)
        if self._link is None or self._peer_info is None:
            raise RequestRefused("peer_lost", NO_PEER)
        check_fits_peer(request, self._peer_info)
        seats = self._max_num_seqs - self._handoff.count(Phase.PREFILLING, Phase.DECODING, Phase.CANCELLING)
        check_queue(self._handoff.count(Phase.WAITING), max_waiting=self._max_waiting + max(0, seats))

    def _start_prefills(self) -> None:
        """Reserve blocks for waiting requests, in order, while there is room: this is the back-pressure."""
        while (request_id := self._handoff.next_waiting()) is not None:
            num_blocks = self._scheduler.manager.num_blocks_for(self._requests[request_id].num_prompt_tokens)
            blocks = self._scheduler.reserve(num_blocks)
            if blocks is None:
                return
            self._blocks[request_id] = blocks
            self._observe_blocks_in_use()
            self._handle(BlocksReserved(request_id, tuple(block.block_id for block in blocks)))

    def _expire(self) -> None:
        for request in self._loop.expire():  # its own deadline, for the whole answer
            self._forget(request.request_id)
        self._handle(TimePassed(self._clock()))

    def _fail_stuck(self) -> bool:
        """Nothing can be scheduled. Blocks that are with the prefill side will come back; without any, a request is
        better refused than all of them left hanging.
        """
        if self._blocks or not self._scheduler.has_work:
            return False
        request_id = next(self._scheduler.requests()).request_id
        logger.error("nothing could be scheduled; giving up request %s", request_id)
        self._loop.fail(request_id, "internal", "The decode instance could not schedule this request.")
        self._forget(request_id)
        return True

    def _forget(self, request_id: str) -> None:
        """The request has no client any more."""
        self._requests.pop(request_id, None)
        self._reports.forget(request_id)
        self._handle(Aborted(request_id))

    def _observe_blocks_in_use(self) -> None:
        self._outputs.observe_blocks_in_use(self._scheduler.manager.pool.num_blocks_in_use)

    def _handle(self, event: Event) -> None:
        for effect in self._handoff.handle(event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendPrefill(request_id, block_ids):
                self._send_prefill(self._requests[request_id], block_ids)
            case SendCancel(request_id):
                assert self._link is not None
                self._link.send(CancelPrefill(request_id=request_id))
            case FreeBlocks(request_id):
                self._scheduler.release(self._blocks.pop(request_id))
            case StartDecode(request_id):
                self._start_decode(self._requests.pop(request_id))
            case StopDecode(request_id):
                self._scheduler.abort(request_id)
            case FailRequest(request_id, code, message):
                self._requests.pop(request_id, None)
                self._outputs.fail(request_id, code, message)
            case _:
                assert_never(effect)

    def _send_prefill(self, request: Request, block_ids: tuple[int, ...]) -> None:
        assert self._link is not None
        self._link.send(prefill_message(request, block_ids, default_mode=self._transfer_mode))

    def _start_decode(self, request: Request) -> None:
        """Tell the first token like any other; unless it ends the answer, the request joins the running batch."""
        request_id = request.request_id
        self._reports.apply(request)
        self._num_first_tokens += 1
        blocks = self._blocks.pop(request_id)
        if self._tell_first_token(request):
            self._scheduler.release(blocks)
            self._reports.forget(request_id)
            self._handle(DecodeFinished(request_id))
        else:
            self._scheduler.add_computed(request, blocks)

    def _tell_first_token(self, request: Request) -> bool:
        try:
            return self._outputs.process(request)
        except Exception as error:  # text of one answer can't be made: that answer's trouble alone
            logger.exception("request %s: its first token can't be told", request.request_id)
            message = f"The engine failed while writing this answer: {error}"
            self._outputs.fail(request.request_id, "internal", message)
            return True
