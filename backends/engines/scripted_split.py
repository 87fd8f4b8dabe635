"""The two sides of the scripted test double: see `backends.engines.scripted`. No KV moves, but blocks are held.

The decode side keeps a request's blocks from `Prefill` until the prefill side has let go of them, as the real one must.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from typing import BinaryIO

from typing_extensions import override

from backends.config import EngineConfig
from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.engines.base import Emit, EmitPeer, PeerLink
from backends.engines.scripted import BlockCount, Script, ScriptedCodec, ScriptedEngine, scripted_info
from backends.protocol.messages import (
    PROTOCOL_VERSION,
    CancelPrefill,
    EngineInfo,
    EngineStats,
    FromPrefill,
    Prefill,
    Prefilled,
    PrefillFailed,
    PrefillStarted,
    Released,
    ToPrefill,
)

KV_MEMORY_BYTES = 4096
NO_PEER = "The prefill side of the split engine is not connected; try again, or use X-Cache-Mode: merged."


class ScriptedDecodeEngine(ScriptedEngine):
    """Sends each prompt to its prefill side, and repeats it once that has answered."""

    def __init__(self, config: EngineConfig, script: Script, emit: Emit, codec: ScriptedCodec) -> None:
        super().__init__(config, script, emit, codec)
        self._memory: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the engine
        self._memory.truncate(KV_MEMORY_BYTES)
        self._link: PeerLink | None = None
        self._prefilling: dict[str, Request | None] = {}  # None: aborted, but the prefill side has not let go yet

    @property
    def kv_memory_fd(self) -> int:
        return self._memory.fileno()

    @property
    def kv_memory_bytes(self) -> int:
        return KV_MEMORY_BYTES

    @override
    def submit(self, request: Request) -> None:
        if self._link is None:
            raise RequestRefused("peer_lost", NO_PEER)
        super().submit(request)

    @override
    def abort(self, request_id: str) -> None:
        if self._prefilling.get(request_id) is not None and self._link is not None:
            self._prefilling[request_id] = None
            self._link.send(CancelPrefill(request_id=request_id))
            return
        super().abort(request_id)

    @override
    def num_unfinished(self) -> int:
        return super().num_unfinished() + len(self._prefilling)

    @override
    def close(self) -> None:
        self._memory.close()

    def peer_connected(self, link: PeerLink, info: EngineInfo) -> None:
        self._link = link

    def peer_message(self, message: FromPrefill) -> None:
        match message:
            case Prefilled(request_id=request_id):
                request = self._let_go(request_id)
                if request is not None:
                    self._blocks.grow(request_id, request.num_prompt_tokens + 1)
                    super()._start(request)
            case Released(request_id=request_id):
                self._let_go(request_id)
            case PrefillFailed(request_id=request_id, code=code, message=text):
                request = self._let_go(request_id)
                if request is not None:
                    self._fail(request, code, text)
            case _:
                pass

    def peer_lost(self, reason: str) -> None:
        self._link = None
        waiting, self._waiting = self._waiting, deque()
        lost = [*waiting, *(self._let_go(request_id) for request_id in list(self._prefilling))]
        for request in lost:
            if request is not None:
                self._fail(request, "peer_lost", reason)

    def _let_go(self, request_id: str) -> Request | None:
        self._blocks.give_back(request_id)
        return self._prefilling.pop(request_id)

    @override
    def _start(self, request: Request) -> None:
        """Blocks are reserved: the prefill side may write to them from now on."""
        assert self._link is not None
        self._prefilling[request.request_id] = request
        prefill = Prefill(
            request_id=request.request_id,
            token_ids=request.prompt_token_ids,
            block_ids=list(range(self._blocks.held[request.request_id])),
            sampling=request.sampling,
            cache=request.cache,
            transfer_mode=request.cache.transfer_mode or "layer",
            seed=request.seed,
        )
        self._link.send(prefill)


class ScriptedPrefillEngine:
    """Takes one prompt a step."""

    def __init__(self, config: EngineConfig, script: Script) -> None:
        self.info = scripted_info(config, script)
        self._script = script
        self._blocks = BlockCount(self.info.num_blocks, config.block_size)
        self._emit: EmitPeer | None = None
        self._queue: deque[Prefill] = deque()
        self._num_steps = 0

    def pair(
        self, info: EngineInfo, kv_memory_fd: int, kv_memory_bytes: int, emit: EmitPeer, *, protocol_version: int
    ) -> str | None:
        if protocol_version != PROTOCOL_VERSION:
            return f"protocol version {protocol_version} there, {PROTOCOL_VERSION} here"
        if info.block_size != self.info.block_size:
            return f"block_size {info.block_size} there, {self.info.block_size} here"
        if os.fstat(kv_memory_fd).st_size != kv_memory_bytes:
            return "the KV memory has another size than was said"
        self._emit = emit
        return None

    def unpair(self) -> None:
        self._emit = None
        self._queue.clear()
        for request_id in list(self._blocks.held):
            self._blocks.give_back(request_id)

    def peer_message(self, message: ToPrefill) -> None:
        match message:
            case Prefill():
                self._queue.append(message)
            case CancelPrefill(request_id=request_id):
                known = [prefill for prefill in self._queue if prefill.request_id == request_id]
                for prefill in known:
                    self._queue.remove(prefill)
                    self._say(Released(request_id=request_id))
            case _:
                pass

    def step(self) -> bool:
        if not self._queue:
            return False
        prefill = self._queue[0]
        started = time.monotonic()
        self._num_steps += 1
        self._blocks.grow(prefill.request_id, len(prefill.token_ids))
        self._say(PrefillStarted(request_id=prefill.request_id, at=started, cached_tokens=0))
        time.sleep(self._script.delay)
        self._blocks.give_back(prefill.request_id)
        self._queue.popleft()
        self._say(self._prefilled(prefill, started))
        return True

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._queue),
            num_blocks=self.info.num_blocks,
            num_blocks_in_use=self._blocks.in_use,
            peak_blocks_in_use=self._blocks.peak,
            num_steps=self._num_steps,
        )

    def reset_peaks(self, *, clear_prefix_cache: bool) -> None:
        self._blocks.peak = self._blocks.in_use

    def num_unfinished(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        pass

    def _say(self, message: FromPrefill) -> None:
        if self._emit is not None:
            self._emit(message)

    def _prefilled(self, prefill: Prefill, started: float) -> Prefilled:
        return Prefilled(
            request_id=prefill.request_id,
            token_id=prefill.token_ids[0],
            first_scheduled_at=started,
            sampled_at=time.monotonic(),
            cached_tokens=0,
            transfer_seconds=0.0,
            transfer_overlapped_seconds=0.0,
            transfer_bytes=4 * len(prefill.token_ids),
            num_preemptions=0,
            peak_kv_blocks=self._blocks.peak,
            peak_memory_bytes=0,
        )
