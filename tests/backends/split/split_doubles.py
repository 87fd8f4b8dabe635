"""Both sides of a split engine in one process, joined by links of two queues each; nothing arrives by itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from scripted_kv import EOS, ScriptedRunner
from split_sides import DecodeDouble, PrefillDouble

from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.engines.base import PeerId
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import PrefillEngine
from backends.kv_transfer.shared_memory import CacheBytes, SharedKVMemory
from backends.protocol.messages import (
    CacheParams,
    Done,
    Failed,
    FromEngine,
    FromPrefill,
    SamplingParams,
    TokenChunk,
    ToPrefill,
    TransferMode,
)

WAIT_SECONDS = 20.0


class Wire:
    """The connection of one decode and one prefill side; delivered when told to."""

    def __init__(self, decode: DecodeDouble, prefill: PrefillDouble, peer: PeerId) -> None:
        self.decode = decode
        self.prefill = prefill
        self.peer = peer  # as either calls the other
        self.to_prefill: deque[ToPrefill] = deque()
        self.from_prefill: deque[FromPrefill] = deque()
        self.frozen = False  # nothing arrives any more, but both ends are there

    def connect(self) -> str | None:
        pair = self.decode.engine.pair_message()
        fd = self.decode.engine.kv_memory_fd
        refusal = self.prefill.engine.pair(self.peer, pair, fd, self.from_prefill.append)
        if refusal is None:
            self.decode.engine.peer_connected(self.peer, self, self.prefill.engine.info)
        return refusal

    def send(self, message: ToPrefill) -> None:
        self.to_prefill.append(message)

    @property
    def has_mail(self) -> bool:
        return not self.frozen and bool(self.to_prefill or self.from_prefill)

    def deliver(self) -> bool:
        delivered = self.has_mail
        while self.to_prefill and not self.frozen:
            self.prefill.engine.peer_message(self.peer, self.to_prefill.popleft())
        while self.from_prefill and not self.frozen:
            self.decode.engine.peer_message(self.peer, self.from_prefill.popleft())
        return delivered

    def lose_prefill(self, reason: str = "killed by signal 9") -> None:
        """The prefill side ends: what it said last may have arrived, what it was told is lost."""
        self.prefill.engine.unpair(self.peer)
        self.to_prefill.clear()
        self.from_prefill.clear()
        self.decode.engine.peer_lost(self.peer, reason)

    def hang_prefill(self) -> None:
        """The decode side sees no sign of life any more."""
        self.frozen = True
        self.decode.engine.peer_hung(self.peer, "it said nothing for 10 seconds")


class SplitFleet:
    """Decode and prefill engines, all connected with all by `connect`. Requests go to the decode side that is named."""

    def __init__(
        self,
        *,
        num_prefills: int = 1,
        num_decodes: int = 1,
        prefill_blocks: int = 32,
        decode_blocks: int = 32,
        prefill_seqs: int = 8,
        decode_seqs: int = 8,
        chunk: int = 64,
        transfer_mode: TransferMode = "layer",
        max_in_flight: int = 2,
        max_waiting: int = 100,
        timeout_seconds: float = 100.0,
        decode_runner: Callable[[CacheBytes], ScriptedRunner] = ScriptedRunner,
        prefill_runner: Callable[[CacheBytes], ScriptedRunner] = ScriptedRunner,
    ) -> None:
        self.now = 0.0  # of the decode sides, beside the real clock
        self.woken = threading.Event()
        self.before_copy: Callable[[], None] = lambda: None
        self.decodes = [
            DecodeDouble(
                num_blocks=decode_blocks,
                max_num_seqs=decode_seqs,
                max_waiting=max_waiting,
                chunk=chunk,
                transfer_mode=transfer_mode,
                timeout_seconds=timeout_seconds,
                clock=self.clock,
                make_runner=decode_runner,
            )
            for _ in range(num_decodes)
        ]
        self.prefills = [
            PrefillDouble(
                num_blocks=prefill_blocks,
                max_num_seqs=prefill_seqs,
                chunk=chunk,
                max_in_flight=max_in_flight,
                wake=self.woken.set,
                before_copy=self._pass_gate,
                make_runner=prefill_runner,
            )
            for _ in range(num_prefills)
        ]
        self.wires: list[Wire] = []
        self._num_wires = 0

    def _pass_gate(self) -> None:
        self.before_copy()  # which tests replace while copies run

    def clock(self) -> float:
        return time.monotonic() + self.now

    def connect(self) -> None:
        """Connect what isn't."""
        for number, prefill in enumerate(self.prefills):
            for decode in self.decodes:
                if not any(wire.decode is decode and wire.prefill is prefill for wire in self.wires):
                    self._connect(decode, prefill, f"prefill-{number}")

    def _connect(self, decode: DecodeDouble, prefill: PrefillDouble, name: str) -> None:
        self._num_wires += 1
        wire = Wire(decode, prefill, PeerId(name, self._num_wires))
        reason = wire.connect()
        assert reason is None, reason
        self.wires.append(wire)

    def wires_of(self, side: DecodeDouble | PrefillDouble) -> list[Wire]:
        return [wire for wire in self.wires if side in (wire.decode, wire.prefill)]

    def kill_prefill(self, number: int = 0) -> None:
        """The prefill process dies."""
        for wire in self.wires_of(self.prefills[number]):
            wire.lose_prefill()
            self.wires.remove(wire)

    def hang_prefill(self, number: int = 0) -> None:
        for wire in self.wires_of(self.prefills[number]):
            wire.hang_prefill()

    def kill_decode(self, number: int = 0) -> None:
        """The prefill sides see a decode side go."""
        for wire in self.wires_of(self.decodes[number]):
            wire.to_prefill.clear()
            wire.prefill.engine.unpair(wire.peer)
            self.wires.remove(wire)

    def deliver(self) -> bool:
        delivered = [wire.deliver() for wire in self.wires]
        return any(delivered)

    def turn(self) -> bool:
        """Everything that can happen once. False: all sides wait."""
        progressed = self.deliver()
        for prefill in self.prefills:
            progressed |= prefill.engine.step()
        for decode in self.decodes:
            progressed |= decode.engine.step()
        return progressed or any(wire.has_mail for wire in self.wires)

    def run_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            self.woken.clear()
            if not self.turn() and not condition():
                assert self.woken.wait(end - time.monotonic()), "all sides wait for ever"
            assert time.monotonic() < end, "no end in sight"

    def run(self) -> None:
        """Until every request has ended on all sides."""
        self.run_until(lambda: not any(side.engine.num_unfinished() for side in (*self.decodes, *self.prefills)))

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        to: int = 0,
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        now = self.clock()
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            max_tokens=max_tokens,
            eos_token_ids=frozenset({EOS}),
            sampling=sampling or SamplingParams(ignore_eos=True),
            cache=cache or CacheParams(),
            seed=1,
            arrived_at=now,
            deadline_at=None if deadline_seconds is None else now + deadline_seconds,
        )
        self.decodes[to].engine.submit(request)

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for decode in self.decodes
            for event in decode.emitted
            if isinstance(event, TokenChunk) and event.request_id == request_id
            for token in event.token_ids
        ]

    def ends(self, request_id: str) -> list[Done | Failed]:
        return [
            event
            for decode in self.decodes
            for event in decode.emitted
            if isinstance(event, Done | Failed) and event.request_id == request_id
        ]

    def done(self, request_id: str) -> Done:
        (end,) = self.ends(request_id)
        assert isinstance(end, Done), end
        return end

    def failed(self, request_id: str) -> Failed:
        (end,) = self.ends(request_id)
        assert isinstance(end, Failed), end
        return end

    def assert_idle(self) -> None:
        """No request, no block in use and no wrong KV on any side."""
        for side in (*self.decodes, *self.prefills):
            assert side.runner.mismatches == []
            assert side.engine.num_unfinished() == 0
            assert side.engine.stats().num_blocks_in_use == 0
            side.scheduler.check_integrity()
        for decode in self.decodes:
            assert len(decode.reports) == 0

    def close(self) -> None:
        for prefill in self.prefills:
            prefill.engine.close()
        for decode in self.decodes:
            del decode.runner.cache
            decode.engine.close()


class SplitPair(SplitFleet):
    """One of each."""

    @property
    def emitted(self) -> list[FromEngine]:
        return self.decodes[0].emitted

    @property
    def memory(self) -> SharedKVMemory:
        return self.decodes[0].memory

    @property
    def decode(self) -> DecodeEngine:
        return self.decodes[0].engine

    @property
    def decode_runner(self) -> ScriptedRunner:
        return self.decodes[0].runner

    @property
    def decode_scheduler(self) -> Scheduler:
        return self.decodes[0].scheduler

    @property
    def prefill(self) -> PrefillEngine:
        return self.prefills[0].engine

    @property
    def prefill_runner(self) -> ScriptedRunner:
        return self.prefills[0].runner

    @property
    def prefill_scheduler(self) -> Scheduler:
        return self.prefills[0].scheduler

    @property
    def wire(self) -> Wire:
        return self.wires[0]

    @property
    def peer(self) -> PeerId:
        return self.wire.peer

    @property
    def to_prefill(self) -> deque[ToPrefill]:
        return self.wire.to_prefill

    @property
    def from_prefill(self) -> deque[FromPrefill]:
        return self.wire.from_prefill
