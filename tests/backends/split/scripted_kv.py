"""A scripted model whose KV says what it is of.

Each slot of its KV holds a checksum of its token and all before it, the layer, and whether it is K or V. To sample,
the runner reads every slot of the request back from its cache: a copy that misses, misplaces or overwrites anything
shows as a mismatch at the first token that depends on it.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from backends.core.request import Request
from backends.core.scheduler_types import ScheduledRequest
from backends.engines.stepper import LayerCallback
from backends.kv_transfer.shared_memory import CacheBytes

BLOCK_SIZE = 4
NUM_LAYERS = 3
SLOT = struct.Struct("<IHH")  # checksum of the tokens so far, layer, 0 for K and 1 for V
BYTES_PER_BLOCK = BLOCK_SIZE * SLOT.size
VOCAB_SIZE = 40
EOS = 0


def prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]


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


def expected(tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Of an answer that its length alone ends."""
    return reference(tokens, max_tokens, ignore_eos=True)


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
