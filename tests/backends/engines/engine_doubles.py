"""Stand-ins for what an engine is made of: a model whose KV can be checked, a detokenizer, a clock, a memory probe."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backends.core.block_pool import BlockPool
from backends.core.kv_cache_manager import KVCacheManager, token_ids_between
from backends.core.prefix_hash import Digest, blake2b_256
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.core.scheduler_types import ScheduledRequest
from backends.engines.merged import MergedEngine
from backends.engines.outputs import OutputProcessor
from backends.engines.stats import MemoryReading
from backends.engines.stepper import Stepper
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    EngineInfo,
    Failed,
    FromEngine,
    SamplingParams,
    TokenChunk,
)

VOCAB_SIZE = 1000
EOS = VOCAB_SIZE  # never sampled by `next_token`
NO_TEXT = VOCAB_SIZE + 1


def next_token(kv: Sequence[int]) -> int:
    """What the model says after a text whose KV is this. Every entry counts, as in attention."""
    return zlib.crc32(repr(kv).encode()) % VOCAB_SIZE


def kv_of(token_id: int, position: int) -> int:
    return token_id * 100_003 + position


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The answer, computed without blocks, chunks or batches."""
    kv = [kv_of(token_id, position) for position, token_id in enumerate(prompt)]
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(next_token(kv))
        kv.append(kv_of(output[-1], len(kv)))
    return output


class PagedRunner:
    """A model of one number of KV a token, kept in blocks: wrong blocks give wrong tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._kv = [-1] * (num_blocks * block_size)
        self.batches: list[dict[str, int]] = []
        self.fail_next = False

    def execute(
        self, scheduled: Sequence[ScheduledRequest], *, on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        self.batches.append({item.request.request_id: item.num_tokens for item in scheduled})
        for item in scheduled:
            self._write(item)
        if on_layer is not None:
            on_layer(0)
        return [self._sample(item) if item.samples else None for item in scheduled]

    def _write(self, item: ScheduledRequest) -> None:
        request, stop = item.request, item.start + item.num_tokens
        for position, token_id in enumerate(token_ids_between(request, item.start, stop), start=item.start):
            block = request.blocks[position // self._block_size]
            assert block.ref_count == 1, "a shared block is written to"
            self._kv[self._slot(request, position)] = kv_of(token_id, position)

    def _sample(self, item: ScheduledRequest) -> int:
        stop = item.start + item.num_tokens
        return next_token([self._kv[self._slot(item.request, position)] for position in range(stop)])

    def _slot(self, request: Request, position: int) -> int:
        block_id = request.blocks[position // self._block_size].block_id
        return block_id * self._block_size + position % self._block_size


class ScriptedRunner:
    """Says what it is told: request id -> its tokens, one after another."""

    def __init__(self, script: dict[str, Sequence[int]]) -> None:
        self._script = script

    def execute(
        self, scheduled: Sequence[ScheduledRequest], *, on_layer: Callable[[int], None] | None = None
    ) -> list[int | None]:
        return [self._next(item.request) if item.samples else None for item in scheduled]

    def _next(self, request: Request) -> int:
        return self._script[request.request_id][len(request.output_token_ids)]


class LetterDetokenizer:
    """Token 97 is "a", and so on. Holds back what may become a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = stop
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        if token_id == NO_TEXT:
            raise ValueError("this token has no text")
        self._held += chr(token_id)
        for stop in self._stop:
            if stop in self._held:
                self.matched_stop = stop
                return self._release(self._held.index(stop), drop_rest=True)
        keep = max(n for n in range(len(self._held) + 1) if self._may_become_stop(self._held[-n:] if n else ""))
        return self._release(len(self._held) - keep)

    def finish(self) -> str:
        return self._release(len(self._held))

    def _may_become_stop(self, text: str) -> bool:
        return not text or any(stop.startswith(text) for stop in self._stop)

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        text, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        return text


class Clock:
    """Time that passes only when told to, or by `tick` at each look."""

    def __init__(self, *, tick: float = 0.0) -> None:
        self.now = 0.0
        self._tick = tick

    def __call__(self) -> float:
        self.now += self._tick
        return self.now


class FixedMemory:
    def __init__(self) -> None:
        self.num_resets = 0

    def read(self) -> MemoryReading:
        return MemoryReading(memory_bytes=1000, peak_memory_bytes=2000)

    def reset_peak(self) -> None:
        self.num_resets += 1


@dataclass
class Harness:
    """An engine and everything it said."""

    engine: MergedEngine
    scheduler: Scheduler
    runner: PagedRunner | ScriptedRunner
    clock: Clock
    memory: FixedMemory
    said: list[FromEngine] = field(default_factory=list)

    def submit(self, request_id: str, prompt: Sequence[int], **kwargs: object) -> Request:
        request = make_request(request_id, prompt, **kwargs)  # type: ignore[arg-type]
        request.arrived_at = self.clock.now
        self.engine.submit(request)
        return request

    def step(self) -> bool:
        progressed = self.engine.step()
        self.scheduler.check_integrity()
        return progressed

    def run(self, *, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert self.engine.num_unfinished() == 0
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.engine.stats()}")

    def tokens(self, request_id: str) -> list[int]:
        chunks = [item for item in self.said if isinstance(item, TokenChunk) and item.request_id == request_id]
        return [token_id for chunk in chunks for token_id in chunk.token_ids]

    def text(self, request_id: str) -> str:
        chunks = [item for item in self.said if isinstance(item, TokenChunk) and item.request_id == request_id]
        return "".join(chunk.text for chunk in chunks) + self.done(request_id).text

    def done(self, request_id: str) -> Done:
        (done,) = [item for item in self.said if isinstance(item, Done) and item.request_id == request_id]
        return done

    def failed(self, request_id: str) -> Failed:
        (failed,) = [item for item in self.said if isinstance(item, Failed) and item.request_id == request_id]
        return failed

    def kinds(self, request_id: str) -> list[str]:
        return [type(item).__name__ for item in self.said if getattr(item, "request_id", None) == request_id]

    def accepted(self, request_id: str) -> Accepted:
        (accepted,) = [item for item in self.said if isinstance(item, Accepted) and item.request_id == request_id]
        return accepted


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    sampling: SamplingParams | None = None,
    cache: CacheParams | None = None,
    deadline_at: float | None = None,
    notices: tuple[str, ...] = (),
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}),
        sampling=sampling or SamplingParams(),
        cache=cache or CacheParams(),
        seed=0,
        arrived_at=0.0,
        deadline_at=deadline_at,
        notices=notices,
    )


def make_harness(
    *,
    runner: ScriptedRunner | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_batched_tokens: int = 256,
    prefill_chunk_tokens: int = 256,
    prefill_token_ratio: float = 1.0,
    max_num_seqs: int = 64,
    max_waiting: int = 64,
    digest: Digest = blake2b_256,
    tick: float = 0.0,
) -> Harness:
    clock, memory = Clock(tick=tick), FixedMemory()
    scheduler = Scheduler(
        KVCacheManager(BlockPool(num_blocks), block_size, enable_prefix_cache=True, digest=digest),
        max_batched_tokens=max_batched_tokens,
        prefill_chunk_tokens=prefill_chunk_tokens,
        prefill_token_ratio=prefill_token_ratio,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
    )
    said: list[FromEngine] = []
    model = runner or PagedRunner(num_blocks, block_size)
    outputs = OutputProcessor(
        role="merged",
        detokenizer_factory=lambda request: LetterDetokenizer(request.sampling.stop),
        emit=said.append,
        max_num_tokens=scheduler.max_request_tokens,
        peak_memory_bytes=lambda: memory.read().peak_memory_bytes,
    )
    engine = MergedEngine(
        info=make_info(num_blocks=num_blocks, block_size=block_size),
        scheduler=scheduler,
        stepper=Stepper(scheduler, model, clock=clock),
        outputs=outputs,
        memory=memory,
        emit=said.append,
        clock=clock,
    )
    return Harness(engine, scheduler, model, clock, memory, said)


def make_info(*, num_blocks: int, block_size: int) -> EngineInfo:
    return EngineInfo(
        role="merged",
        pid=1,
        served_name="scripted",
        model_path="",
        model_fingerprint="",
        max_model_len=num_blocks * block_size,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_dtype="fp32",
        kv_bytes_per_token=1,
        weight_dtype="fp32",
        device="cpu",
        num_threads=1,
    )
