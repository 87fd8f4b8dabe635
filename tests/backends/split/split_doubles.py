"""Both sides of a split engine in one process: runners whose KV says what it is of, and links of two queues each.

Each slot of the scripted KV holds a checksum of its token and all before it, the layer, and whether it is K or V. To
sample, the runner reads every slot of the request back from its cache: a copy that misses, misplaces or overwrites
anything shows as a mismatch at the first token that depends on it.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from typing_extensions import override

from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import ScheduledRequest
from backends.engines.base import PeerId
from backends.engines.outputs import OutputProcessor
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import PrefillEngine
from backends.engines.split.prefill_report import PrefillReports
from backends.engines.stats import MemoryReading
from backends.engines.stepper import LayerCallback, Stepper
from backends.kv_transfer.base import KVConnector
from backends.kv_transfer.shared_memory import CacheBytes, SharedKVMemory, SharedMemoryConnector
from backends.protocol.messages import (
    CacheParams,
    Done,
    EngineInfo,
    Failed,
    FromEngine,
    FromPrefill,
    Pair,
    Role,
    SamplingParams,
    TokenChunk,
    ToPrefill,
    TransferMode,
)

BLOCK_SIZE = 4
NUM_LAYERS = 3
SLOT = struct.Struct("<IHH")  # checksum of the tokens so far, layer, 0 for K and 1 for V
BYTES_PER_BLOCK = BLOCK_SIZE * SLOT.size
VOCAB_SIZE = 40
EOS = 0
WAIT_SECONDS = 20.0


def checksums(tokens: Iterable[int]) -> list[int]:
    sums, last = [], 0
    for token in tokens:
        last = zlib.crc32(struct.pack("<I", token), last)
        sums.append(last)
    return sums


def next_token(tokens: Sequence[int]) -> int:
    """What the scripted model answers after these tokens."""
    return zlib.crc32(b"next", checksums(tokens)[-1]) % VOCAB_SIZE


def reference(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class ScriptedRunner:
    """Writes and reads a small KV cache as a model would."""

    def __init__(self, cache: CacheBytes) -> None:
        self.cache = cache
        self.mismatches: list[str] = []
        self.chunks: list[tuple[str, int, int]] = []
        self.fail_next: Exception | None = None
        self.before_layer: Callable[[int], object] = lambda _: None

    def execute(
        self, scheduled: Sequence[ScheduledRequest], *, on_layer: LayerCallback | None = None
    ) -> list[int | None]:
        for layer in range(NUM_LAYERS):
            self.before_layer(layer)
            for item in scheduled:
                self._write(layer, item)
            if on_layer is not None:
                on_layer(layer)
            if self.fail_next is not None and layer == 1:
                error, self.fail_next = self.fail_next, None
                raise error
        self.chunks += [(item.request.request_id, item.start, item.num_tokens) for item in scheduled]
        return [self._sample(item.request) if item.samples else None for item in scheduled]

    def _slot(self, request: Request, layer: int, kv: int, position: int) -> CacheBytes:
        block = request.blocks[position // BLOCK_SIZE].block_id
        offset = position % BLOCK_SIZE * SLOT.size
        return self.cache[layer, kv, block, offset : offset + SLOT.size]

    def _write(self, layer: int, item: ScheduledRequest) -> None:
        sums = checksums(item.request.prompt_token_ids + item.request.output_token_ids)
        for position in range(item.start, item.start + item.num_tokens):
            for kv in range(2):
                value = SLOT.pack(sums[position], layer, kv)
                self._slot(item.request, layer, kv, position)[:] = np.frombuffer(value, dtype=np.uint8)

    def _sample(self, request: Request) -> int:
        tokens = request.prompt_token_ids + request.output_token_ids
        for position, expected in enumerate(checksums(tokens)):
            for layer in range(NUM_LAYERS):
                for kv in range(2):
                    value = self._slot(request, layer, kv, position).tobytes()
                    if value != SLOT.pack(expected, layer, kv):
                        self.mismatches.append(f"{request.request_id}: layer {layer}, kv {kv}, token {position}")
        return next_token(tokens)


class ScriptedDetokenizer:
    """Each token is its number and a comma."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._text = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        self._text += f"{token_id},"
        self.matched_stop = next((stop for stop in self._stop if stop in self._text), None)
        return "" if self.matched_stop else f"{token_id},"

    def finish(self) -> str:
        return ""


class ScriptedMemory:
    def read(self) -> MemoryReading:
        return MemoryReading(memory_bytes=1, peak_memory_bytes=2)

    def reset_peak(self) -> None:
        pass


class ScriptedConnector(SharedMemoryConnector):
    """A real connector that asks before each copy."""

    def __init__(self, source: CacheBytes, memory: SharedKVMemory, before_copy: Callable[[], None]) -> None:
        super().__init__(source, memory, block_size=BLOCK_SIZE)
        self._before_copy = before_copy

    @override
    def save_kv_layer(
        self, layer: int, source_block_ids: Sequence[int], target_block_ids: Sequence[int], start: int, stop: int
    ) -> int:
        self._before_copy()
        return super().save_kv_layer(layer, source_block_ids, target_block_ids, start, stop)


def make_info(role: Role, num_blocks: int, **changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "role": role,
        "pid": 1,
        "served_name": "m",
        "model_path": "m",
        "model_fingerprint": "weights-1",
        "max_model_len": 1000,
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "kv_cache_dtype": "fp32",
        "kv_bytes_per_token": NUM_LAYERS * 2 * SLOT.size,
        "weight_dtype": "fp32",
        "device": "cpu",
        "num_threads": 1,
    }
    return EngineInfo(**{**values, **changes})  # type: ignore[arg-type]


def make_scheduler(num_blocks: int, *, max_num_seqs: int, chunk: int, max_waiting: int = 1000) -> Scheduler:
    manager = KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, enable_prefix_cache=True)
    return Scheduler(
        manager,
        max_batched_tokens=64,
        prefill_chunk_tokens=chunk,
        prefill_token_ratio=1.0,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )


class DecodeDouble:
    """A decode engine with a scripted runner over shared memory."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_waiting: int,
        chunk: int,
        transfer_mode: TransferMode,
        timeout_seconds: float,
        clock: Callable[[], float],
        make_runner: Callable[[CacheBytes], ScriptedRunner],
    ) -> None:
        self.emitted: list[FromEngine] = []
        self.prefaulted: list[int] = []
        self.memory = SharedKVMemory.create(NUM_LAYERS * 2 * num_blocks * BYTES_PER_BLOCK)
        cache = np.frombuffer(self.memory.buffer, dtype=np.uint8).reshape(NUM_LAYERS, 2, num_blocks, -1)
        self.runner = make_runner(cache)
        self.scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs, chunk=chunk)
        self.reports = PrefillReports()
        outputs = OutputProcessor(
            role="decode",
            detokenizer_factory=lambda request: ScriptedDetokenizer(request.sampling.stop),
            emit=self.emitted.append,
            max_num_tokens=self.scheduler.max_request_tokens,
            peak_memory_bytes=lambda: 3,
            complete_timings=self.reports.complete_timings,
        )
        self.engine = DecodeEngine(
            info=make_info("decode", num_blocks),
            scheduler=self.scheduler,
            stepper=Stepper(self.scheduler, self.runner, clock=clock),
            outputs=outputs,
            reports=self.reports,
            memory=ScriptedMemory(),
            kv_memory=self.memory,
            emit=self.emitted.append,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            transfer_mode=transfer_mode,
            handoff_timeout_seconds=timeout_seconds,
            clock=clock,
        )


class PrefillDouble:
    """A prefill engine with a scripted runner over its own memory."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        chunk: int,
        max_in_flight: int,
        wake: Callable[[], None],
        before_copy: Callable[[], None],
        make_runner: Callable[[CacheBytes], ScriptedRunner],
    ) -> None:
        self._before_copy = before_copy
        self.cache = np.zeros((NUM_LAYERS, 2, num_blocks, BYTES_PER_BLOCK), dtype=np.uint8)
        self.runner = make_runner(self.cache)
        self.scheduler = make_scheduler(num_blocks, max_num_seqs=max_num_seqs, chunk=chunk)
        self.engine = PrefillEngine(
            info=make_info("prefill", num_blocks),
            scheduler=self.scheduler,
            stepper=Stepper(self.scheduler, self.runner),
            memory=ScriptedMemory(),
            connect=self._connect,
            max_transfer_concurrency=max_in_flight,
            wake=wake,
        )

    def _connect(self, pair: Pair, fd: int | None) -> KVConnector:
        assert fd is not None
        return ScriptedConnector(self.cache, SharedKVMemory.attach(fd, pair.kv_memory_bytes), self._before_copy)


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
