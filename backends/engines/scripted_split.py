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
from backends.engines.base import Emit, EmitPeer, PeerId, PeerLink
from backends.engines.scripted import BlockCount, Script, ScriptedCodec, ScriptedEngine, scripted_info
from backends.protocol.messages import (
    PROTOCOL_VERSION,
    CancelPrefill,
    EngineInfo,
    EngineStats,
    FromPrefill,
    Pair,
    Prefill,
    Prefilled,
    PrefillFailed,
    PrefillStarted,
    Released,
    ToPrefill,
)

KV_MEMORY_BYTES = 4096
NO_PEER = "No prefill side of the split engine is connected; try again, or use X-Cache-Mode: merged."


class ScriptedDecodeEngine(ScriptedEngine):
    """Sends each prompt to the prefill side that has the fewest, and repeats it once that has answered."""

    def __init__(self, config: EngineConfig, script: Script, emit: Emit, codec: ScriptedCodec) -> None:
        super().__init__(config, script, emit, codec)
        self._memory: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the engine
        self._memory.truncate(KV_MEMORY_BYTES)
        self._links: dict[PeerId, PeerLink] = {}  # in use; a hung side has none any more
        self._prefilling: dict[str, tuple[PeerId, Request | None]] = {}  # None: ended, but not let go of yet

    @property
    def kv_memory_fd(self) -> int:
        return self._memory.fileno()

    def pair_message(self) -> Pair:
        return Pair(
            info=self.info,
            kv_memory_bytes=KV_MEMORY_BYTES,
            transfer_backend=self._config.transfer_backend,
            lease_seconds=self._config.lease_seconds,
        )

    @override
    def submit(self, request: Request) -> None:
        if not self._links:
            raise RequestRefused("peer_lost", NO_PEER)
        super().submit(request)

    @override
    def abort(self, request_id: str) -> None:
        if request_id not in self._prefilling:
            super().abort(request_id)
            return
        peer, request = self._prefilling[request_id]
        self._prefilling[request_id] = (peer, None)
        if request is not None and peer in self._links:
            self._links[peer].send(CancelPrefill(request_id=request_id))

    @override
    def num_unfinished(self) -> int:
        return super().num_unfinished() + len(self._prefilling)

    @override
    def close(self) -> None:
        self._memory.close()

    def peer_connected(self, peer: PeerId, link: PeerLink, info: EngineInfo) -> None:
        self._links[peer] = link

    def peer_message(self, peer: PeerId, message: FromPrefill) -> None:
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

    def peer_hung(self, peer: PeerId, reason: str) -> None:
        """What waits for it ends; its blocks stay held."""
        self._links.pop(peer, None)
        for request_id, (asked, request) in self._prefilling.items():
            if asked == peer and request is not None:
                self._prefilling[request_id] = (peer, None)
                self._fail(request, "peer_lost", reason)
        if not self._links:
            waiting, self._waiting = self._waiting, deque()
            for request in waiting:
                self._fail(request, "peer_lost", reason)

    def peer_lost(self, peer: PeerId, reason: str) -> None:
        self.peer_hung(peer, reason)
        for request_id in [name for name, (asked, _) in self._prefilling.items() if asked == peer]:
            self._let_go(request_id)

    def _let_go(self, request_id: str) -> Request | None:
        self._blocks.give_back(request_id)
        return self._prefilling.pop(request_id)[1]

    @override
    def _start(self, request: Request) -> None:
        """Blocks are reserved: the prefill side may write to them from now on."""
        asked = [peer for peer, _ in self._prefilling.values()]
        peer = min(self._links, key=asked.count)
        self._prefilling[request.request_id] = (peer, request)
        prefill = Prefill(
            request_id=request.request_id,
            token_ids=request.prompt_token_ids,
            block_ids=list(range(self._blocks.held[request.request_id])),
            sampling=request.sampling,
            cache=request.cache,
            transfer_mode=request.cache.transfer_mode or "layer",
            seed=request.seed,
        )
        self._links[peer].send(prefill)


class ScriptedPrefillEngine:
    """Takes one prompt a step."""

    def __init__(self, config: EngineConfig, script: Script) -> None:
        self.info = scripted_info(config, script)
        self._config = config
        self._script = script
        self._blocks = BlockCount(self.info.num_blocks, config.block_size)
        self._peers: dict[PeerId, EmitPeer] = {}
        self._queue: deque[tuple[PeerId, Prefill]] = deque()
        self._num_steps = 0

    def pair(self, peer: PeerId, pair: Pair, kv_memory_fd: int | None, emit: EmitPeer) -> str | None:
        if pair.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {pair.protocol_version} there, {PROTOCOL_VERSION} here"
        if pair.transfer_backend != self._config.transfer_backend:
            return f"transfer_backend {pair.transfer_backend} there, {self._config.transfer_backend} here"
        if pair.info.block_size != self.info.block_size:
            return f"block_size {pair.info.block_size} there, {self.info.block_size} here"
        if kv_memory_fd is None or os.fstat(kv_memory_fd).st_size != pair.kv_memory_bytes:
            return "the KV memory has another size than was said"
        self._peers[peer] = emit
        return None

    def unpair(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        self._queue = deque(item for item in self._queue if item[0] != peer)

    def peer_message(self, peer: PeerId, message: ToPrefill) -> None:
        match message:
            case Prefill():
                self._queue.append((peer, message))
            case CancelPrefill(request_id=request_id):
                known = [item for item in self._queue if item[0] == peer and item[1].request_id == request_id]
                for item in known:
                    self._queue.remove(item)
                    self._peers[peer](Released(request_id=request_id))
            case _:
                pass

    def step(self) -> bool:
        if not self._queue:
            return False
        peer, prefill = self._queue.popleft()
        say = self._peers[peer]
        started = time.monotonic()
        self._num_steps += 1
        self._blocks.grow(prefill.request_id, len(prefill.token_ids))
        say(PrefillStarted(request_id=prefill.request_id, at=started, cached_tokens=0))
        time.sleep(self._script.delay)
        self._blocks.give_back(prefill.request_id)
        say(self._prefilled(prefill, started))
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
