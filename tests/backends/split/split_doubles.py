"""Both sides of a split engine in one process: a runner whose KV says what it is of, and a link of two queues.

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
    Role,
    SamplingParams,
    TokenChunk,
    ToPrefill,
    TransferMode,
)

BLOCK_SIZE = 4
NUM_LAYERS = 3
SLOT = struct.Struct("<IHH")  # checksum of the tokens so far, layer, 0 for K and 1 for V
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


class SplitPair:
    """A decode and a prefill engine, and what each says to the other, delivered when told to."""

    def __init__(
        self,
        *,
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
        self.now = 0.0  # of the decode side, beside the real clock
        self.emitted: list[FromEngine] = []
        self.to_prefill: deque[ToPrefill] = deque()
        self.from_prefill: deque[FromPrefill] = deque()
        self.woken = threading.Event()
        bytes_per_block = BLOCK_SIZE * SLOT.size

        num_bytes = NUM_LAYERS * 2 * decode_blocks * bytes_per_block
        self.memory = SharedKVMemory.create(num_bytes)
        cache = np.frombuffer(self.memory.buffer, dtype=np.uint8).reshape(NUM_LAYERS, 2, decode_blocks, -1)
        self.decode_runner = decode_runner(cache)
        self.decode_scheduler = make_scheduler(decode_blocks, max_num_seqs=decode_seqs, chunk=chunk)
        stepper = Stepper(self.decode_scheduler, self.decode_runner, clock=self.clock)
        self.reports = PrefillReports()
        outputs = OutputProcessor(
            role="decode",
            detokenizer_factory=lambda request: ScriptedDetokenizer(request.sampling.stop),
            emit=self.emitted.append,
            max_num_tokens=self.decode_scheduler.max_request_tokens,
            peak_memory_bytes=lambda: 3,
            complete_timings=self.reports.complete_timings,
        )
        self.decode = DecodeEngine(
            info=make_info("decode", decode_blocks),
            scheduler=self.decode_scheduler,
            stepper=stepper,
            outputs=outputs,
            reports=self.reports,
            memory=ScriptedMemory(),
            kv_memory=self.memory,
            emit=self.emitted.append,
            max_num_seqs=decode_seqs,
            max_waiting=max_waiting,
            transfer_mode=transfer_mode,
            handoff_timeout_seconds=timeout_seconds,
            clock=self.clock,
        )

        self.before_copy: Callable[[], None] = lambda: None
        self.prefill_cache = np.zeros((NUM_LAYERS, 2, prefill_blocks, bytes_per_block), dtype=np.uint8)
        self.prefill_runner = prefill_runner(self.prefill_cache)
        self.prefill_scheduler = make_scheduler(prefill_blocks, max_num_seqs=prefill_seqs, chunk=chunk)
        self.prefill = PrefillEngine(
            info=make_info("prefill", prefill_blocks),
            scheduler=self.prefill_scheduler,
            stepper=Stepper(self.prefill_scheduler, self.prefill_runner),
            memory=ScriptedMemory(),
            connect=self._connect,
            max_transfer_concurrency=max_in_flight,
            wake=self.woken.set,
        )

    def _connect(self, fd: int, num_bytes: int) -> KVConnector:
        memory = SharedKVMemory.attach(fd, num_bytes)
        return ScriptedConnector(self.prefill_cache, memory, self._pass_gate)

    def _pass_gate(self) -> None:
        self.before_copy()  # which tests replace while copies run

    def clock(self) -> float:
        return time.monotonic() + self.now

    # PeerLink of the decode side
    def send(self, message: ToPrefill) -> None:
        self.to_prefill.append(message)

    def connect(self) -> None:
        reason = self.prefill.pair(
            self.decode.info, self.decode.kv_memory_fd, self.decode.kv_memory_bytes, self.from_prefill.append
        )
        assert reason is None, reason
        self.decode.peer_connected(self, self.prefill.info)

    def kill_prefill(self) -> None:
        """The prefill process dies: what it said last may have arrived, what it was told is lost."""
        self.prefill.unpair()
        self.to_prefill.clear()
        self.from_prefill.clear()
        self.decode.peer_lost("killed by signal 9")

    def kill_decode(self) -> None:
        """The prefill side sees its decode side go."""
        self.to_prefill.clear()
        self.prefill.unpair()

    def deliver(self) -> bool:
        delivered = bool(self.to_prefill or self.from_prefill)
        while self.to_prefill:
            self.prefill.peer_message(self.to_prefill.popleft())
        while self.from_prefill:
            self.decode.peer_message(self.from_prefill.popleft())
        return delivered

    def turn(self) -> bool:
        """Everything that can happen once. False: both sides wait."""
        progressed = self.deliver()
        progressed |= self.prefill.step()
        progressed |= self.decode.step()
        return progressed or bool(self.to_prefill or self.from_prefill)

    def run_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            self.woken.clear()
            if not self.turn() and not condition():
                assert self.woken.wait(end - time.monotonic()), "both sides wait for ever"
            assert time.monotonic() < end, "no end in sight"

    def run(self) -> None:
        """Until every request has ended on both sides."""
        self.run_until(lambda: self.decode.num_unfinished() == 0 and self.prefill.num_unfinished() == 0)

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
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
        self.decode.submit(request)

    def tokens(self, request_id: str) -> list[int]:
        chunks = [e for e in self.emitted if isinstance(e, TokenChunk) and e.request_id == request_id]
        return [token for chunk in chunks for token in chunk.token_ids]

    def ends(self, request_id: str) -> list[Done | Failed]:
        return [e for e in self.emitted if isinstance(e, Done | Failed) and e.request_id == request_id]

    def done(self, request_id: str) -> Done:
        (end,) = self.ends(request_id)
        assert isinstance(end, Done), end
        return end

    def failed(self, request_id: str) -> Failed:
        (end,) = self.ends(request_id)
        assert isinstance(end, Failed), end
        return end

    def assert_idle(self) -> None:
        """No request, no block in use and no wrong KV on either side."""
        assert self.decode_runner.mismatches == []
        assert self.prefill_runner.mismatches == []
        assert self.decode.num_unfinished() == self.prefill.num_unfinished() == 0
        assert self.decode.stats().num_blocks_in_use == 0
        assert self.prefill.stats().num_blocks_in_use == 0
        assert len(self.reports) == 0
        self.decode_scheduler.check_integrity()
        self.prefill_scheduler.check_integrity()

    def close(self) -> None:
        self.prefill.close()
        del self.decode_runner.cache
        self.decode.close()
