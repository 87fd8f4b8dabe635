"""How fast KV moves between two processes here: `python -m backends.kv_transfer.bench [--json]`.

A child process is the decode side and holds the memory; this one writes a prompt's KV into it, chunk by chunk and layer
by layer, as a prefill side does. Figures are of the first time that pages are touched, with and without pages kept
resident ahead, and of later times.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from backends.kv_transfer.base import Connect, KVConnector, KVLayout
from backends.kv_transfer.registry import make_connect, make_pool, unfit
from backends.protocol.messages import EngineInfo, Pair, TransferBackend

BLOCK_SIZE = 16
NUM_LAYERS, BYTES_PER_TOKEN = 30, 23_040  # of the bundled model, in bf16
CHUNK_TOKENS = 512
MAX_HELLO_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Measured:
    backend: str
    tokens: int
    megabytes: float
    pages: str  # "new": never touched; "ahead": kept resident ahead; "again": the same blocks later
    seconds: float
    cpu_seconds: float  # of the writing thread: what is left when others use the cores
    gigabytes_per_second: float


def layout_for(num_tokens: int) -> KVLayout:
    """A pool of twice that many tokens."""
    num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
    return KVLayout(NUM_LAYERS, num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE // (2 * NUM_LAYERS))


def measure(backend: TransferBackend, num_tokens: int, repeats: int) -> list[Measured]:
    layout = layout_for(num_tokens)
    cache = torch.randint(0, 255, (NUM_LAYERS, 2, layout.num_blocks // 2, layout.bytes_per_block), dtype=torch.uint8)
    connect = make_connect(backend, cache, BLOCK_SIZE)
    found: list[Measured] = []
    for pages in ("new", "ahead"):
        with DecodeSide(backend, layout, num_ahead=layout.num_blocks if pages == "ahead" else 0) as decode:
            connector = decode.connect(connect)
            found.append(_timed(connector, backend, num_tokens, layout, pages))
            if pages == "ahead":
                found += [_timed(connector, backend, num_tokens, layout, "again") for _ in range(repeats)]
            connector.close()
    return found


def _timed(connector: KVConnector, backend: TransferBackend, num_tokens: int, layout: KVLayout, pages: str) -> Measured:
    blocks, num_bytes = tuple(range(-(-num_tokens // BLOCK_SIZE))), 0
    started_at, cpu_before = time.perf_counter(), time.thread_time()
    for start in range(0, num_tokens, CHUNK_TOKENS):
        for layer in range(layout.num_layers):
            num_bytes += connector.save_kv_layer(layer, blocks, blocks, start, min(start + CHUNK_TOKENS, num_tokens))
    seconds, cpu_seconds = time.perf_counter() - started_at, time.thread_time() - cpu_before
    return Measured(
        backend, num_tokens, num_bytes / 1e6, pages, seconds, cpu_seconds, num_bytes / 1e9 / max(seconds, 1e-9)
    )


class DecodeSide:
    """The child process, for as long as the context lasts."""

    def __init__(self, backend: TransferBackend, layout: KVLayout, *, num_ahead: int) -> None:
        self._backend = backend
        self._layout = layout
        self._num_ahead = num_ahead
        self._socket, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DecodeSide:
        numbers = map(str, (self._theirs.fileno(), *self._layout, self._num_ahead))
        command = [sys.executable, "-m", "backends.kv_transfer.bench", "--decode-side", self._backend, *numbers]
        self._process = subprocess.Popen(command, pass_fds=[self._theirs.fileno()])
        self._theirs.close()
        return self

    def connect(self, connect: Connect) -> KVConnector:
        """Once its memory is there, and resident where that is asked for."""
        metadata, descriptors, _, _ = socket.recv_fds(self._socket, MAX_HELLO_BYTES, 1)
        if not metadata:
            raise OSError("the decode side ended")
        pair = Pair(
            info=_info(),
            kv_memory_bytes=self._layout.num_bytes,
            transfer_backend=self._backend,
            kv_memory_metadata=metadata[1:],
        )
        try:
            return connect(pair, descriptors[0] if descriptors else None)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def __exit__(self, *_error: object) -> None:
        self._socket.close()  # ends the child
        if self._process is not None:
            self._process.wait()


def run_decode_side(backend: TransferBackend, descriptor: int, layout: KVLayout, num_ahead: int) -> None:
    memory, pool = make_pool(backend, layout, device="cpu", num_blocks_ahead=num_ahead)
    if num_ahead:
        pool.zero_()  # what the thread that keeps pages resident would have done by and by
    with socket.socket(fileno=descriptor) as peer:
        hello = b"!" + memory.metadata
        socket.send_fds(peer, [hello], [memory.fd] if memory.fd >= 0 else [])
        peer.recv(1)  # until the other side is gone
    memory.close()


def _info() -> EngineInfo:
    """Nothing of it is looked at here."""
    numbers = ("pid", "max_model_len", "vocab_size", "num_blocks", "num_threads")
    names = ("served_name", "model_path", "model_fingerprint", "kv_cache_dtype", "weight_dtype", "device")
    values: dict[str, Any] = dict.fromkeys(numbers, 0) | dict.fromkeys(names, "")
    return EngineInfo(role="decode", block_size=BLOCK_SIZE, kv_bytes_per_token=BYTES_PER_TOKEN, **values)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m backends.kv_transfer.bench", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--backend", choices=get_args(TransferBackend), action="append", help="default: all usable here"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--decode-side", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.decode_side:
        backend, descriptor, *numbers = options.decode_side
        *shape, num_ahead = map(int, numbers)
        run_decode_side(backend, int(descriptor), KVLayout(*shape), num_ahead)
        return 0
    backends: list[TransferBackend] = options.backend or [
        name for name in get_args(TransferBackend) if unfit(name, "cpu") is None
    ]
    found = [measured for backend in backends for measured in measure(backend, options.tokens, options.repeats)]
    _print(found, as_json=options.json)
    return 0


def _print(found: list[Measured], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([asdict(measured) for measured in found], indent=1) + "\n")
        return
    for measured in found:
        sys.stdout.write(
            f"{measured.backend:8} {measured.pages:6} {measured.megabytes:7.1f} MB in {measured.seconds * 1e3:6.1f} ms "
            f"(CPU {measured.cpu_seconds * 1e3:6.1f} ms): {measured.gigabytes_per_second:6.2f} GB/s\n"
        )


if __name__ == "__main__":
    sys.exit(main())
