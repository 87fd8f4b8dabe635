"""NIXL itself, where it is installed: between processes, with several threads, and when the other side dies."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_helpers import make_pair

from backends.kv_transfer import nixl_agent
from backends.kv_transfer.base import KVConnector, KVLayout, TransferError
from backends.kv_transfer.nixl import NixlSource

pytestmark = pytest.mark.skipif(nixl_agent.missing() is not None, reason=str(nixl_agent.missing()))

DEADLINE = 20.0
BLOCK_SIZE = 16
LAYOUT = KVLayout(num_layers=4, num_blocks=64, bytes_per_block=6144)
# Holds the pool; says where it is, then answers each block number with the block's bytes in every layer.
DECODE_SIDE = """
import socket, sys
from backends.kv_transfer.base import KVLayout
from backends.kv_transfer.registry import make_pool
layout = KVLayout(*map(int, sys.argv[2:]))
memory, pool = make_pool("nixl", layout, device="cpu", num_blocks_ahead=4)
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(len(memory.metadata).to_bytes(4, "big") + memory.metadata)
blocks = pool.view(layout.num_layers, 2, layout.num_blocks, -1)
while asked := sock.recv(4):
    sock.sendall(blocks[:, :, int.from_bytes(asked, "big")].contiguous().numpy().tobytes())
memory.close()
"""


class DecodeSide:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE)
        command = [sys.executable, "-c", DECODE_SIDE, str(theirs.fileno()), *map(str, LAYOUT)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[3])
        theirs.close()
        self.metadata = self._receive(int.from_bytes(self._receive(4), "big"))

    def block(self, number: int) -> torch.Tensor:
        self.socket.sendall(number.to_bytes(4, "big"))
        data = self._receive(LAYOUT.num_bytes // LAYOUT.num_blocks)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(LAYOUT.num_layers, 2, -1)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = self.socket.recv(size - len(data))
            assert received, "the decode side ended"
            data += received
        return data

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def close(self) -> None:
        self.socket.close()
        self.process.wait(DEADLINE)


@pytest.fixture(scope="module")
def source() -> NixlSource:
    shape = (LAYOUT.num_layers, 2, LAYOUT.num_blocks, LAYOUT.bytes_per_block)
    cache = torch.randint(1, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return NixlSource(cache, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def decode() -> Iterator[DecodeSide]:
    side = DecodeSide()
    yield side
    side.close()


def connect(source: NixlSource, decode: DecodeSide) -> KVConnector:
    return source.connect(make_pair("nixl", decode.metadata, num_bytes=LAYOUT.num_bytes), None)


def test_kv_arrives_in_another_process(source: NixlSource, decode: DecodeSide):
    connector = connect(source, decode)
    source_ids, target_ids = [3, 4, 5, 9], (10, 11, 12, 7)

    for layer in range(LAYOUT.num_layers):
        assert connector.save_kv_layer(layer, source_ids, target_ids, 0, 64) == 2 * 4 * LAYOUT.bytes_per_block
    connector.close()

    for own, theirs in zip(source_ids, target_ids, strict=True):
        assert torch.equal(decode.block(theirs), source.cache[:, :, own])
    assert not decode.block(13).any()


def test_threads_write_at_once(source: NixlSource, decode: DecodeSide):
    connector = connect(source, decode)
    tables = [[first, first + 1] for first in range(20, 28, 2)]
    errors: list[BaseException] = []

    def write(table: list[int]) -> None:
        try:
            for layer in range(LAYOUT.num_layers):
                connector.save_kv_layer(layer, table, table, 0, 2 * BLOCK_SIZE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    connector.close()

    assert errors == []
    for number in range(20, 28):
        assert torch.equal(decode.block(number), source.cache[:, :, number])


def test_a_killed_decode_side_is_an_error_and_its_successor_is_reached(source: NixlSource):
    first = DecodeSide()
    connector = connect(source, first)
    first.kill()

    started_at = time.monotonic()
    with pytest.raises(TransferError):
        connector.save_kv_layer(0, [0], [0], 0, BLOCK_SIZE)
    assert time.monotonic() - started_at < DEADLINE
    with pytest.raises(TransferError):
        connector.save_kv_layer(0, [0], [0], 0, BLOCK_SIZE)
    connector.close()
    with pytest.raises(TransferError):  # nor can it be paired with any more
        connect(source, first)
    first.socket.close()

    second = DecodeSide()
    connector = connect(source, second)
    connector.save_kv_layer(1, [2], [5], 0, BLOCK_SIZE)
    connector.close()
    assert torch.equal(second.block(5)[1], source.cache[1, :, 2])
    second.close()
