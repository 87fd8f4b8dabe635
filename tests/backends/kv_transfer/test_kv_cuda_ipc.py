"""KV by CUDA IPC, with stand-ins for the device: exactly the named slots, and honest errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from kv_helpers import BLOCK_SIZE, LAYOUT, SLOT_BYTES, Copy, as_blocks, copied, make_cache, make_pair, some_copies
from torch import Tensor
from typing_extensions import override

from backends.kv_transfer.base import TransferError
from backends.kv_transfer.cuda_ipc import Copies, CudaConnector, CudaKVMemory, Sharing, cuda_connect


class ScriptedSharing(Sharing):
    """Handles are numbers of tensors in this process."""

    def __init__(self) -> None:
        self.shared: list[Tensor] = []

    @override
    def export(self, memory: Tensor) -> bytes:
        self.shared.append(memory)
        return bytes([len(self.shared) - 1])

    @override
    def open(self, metadata: bytes) -> Tensor:
        if metadata[0] >= len(self.shared):
            raise RuntimeError("invalid resource handle")
        return self.shared[metadata[0]]


class ScriptedCopies(Copies):
    def __init__(self) -> None:
        self.num_runs = 0
        self.fail = False

    @override
    def run(self, copy: Callable[[], None]) -> None:
        if self.fail:
            raise RuntimeError("an illegal memory access was encountered")
        copy()
        self.num_runs += 1


@settings(max_examples=100, derandomize=True, deadline=None)
@given(copy=some_copies())
def test_device_copies_move_exactly_the_named_slots(copy: Copy):
    source_ids, target_ids, start, stop = copy
    cache, target = make_cache(), as_blocks(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    connector = CudaConnector(cache, target, ScriptedCopies(), block_size=BLOCK_SIZE)
    expected = copied(target, cache, 1, source_ids, target_ids, start, stop)

    num_bytes = connector.save_kv_layer(1, source_ids, target_ids, start, stop)

    assert num_bytes == 2 * (stop - start) * SLOT_BYTES
    assert torch.equal(target, expected)


def test_a_prefill_side_opens_what_the_decode_side_exported():
    sharing, cache = ScriptedSharing(), make_cache()
    pool = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    memory = CudaKVMemory(pool, sharing=sharing)
    connector = cuda_connect(cache, BLOCK_SIZE, sharing=sharing)(make_pair("cuda_ipc", memory.metadata), None)

    connector.save_kv_layer(0, [3], [7], 0, 4)

    assert torch.equal(as_blocks(pool)[0, :, 7], cache[0, :, 3])
    assert connector.num_layers == LAYOUT.num_layers
    assert connector.mark() is None  # on a CPU nothing has to be waited for
    assert (memory.backend, memory.fd, memory.num_bytes) == ("cuda_ipc", -1, LAYOUT.num_bytes)
    memory.prefault([1])
    connector.close()
    memory.close()


def test_memory_that_cannot_be_opened_or_has_another_size_is_refused():
    sharing = ScriptedSharing()
    connect = cuda_connect(make_cache(), BLOCK_SIZE, sharing=sharing)
    with pytest.raises(ValueError, match="can't be opened: invalid resource handle"):
        connect(make_pair("cuda_ipc", b"\x00"), None)

    memory = CudaKVMemory(torch.zeros(24, dtype=torch.uint8), sharing=sharing)
    with pytest.raises(ValueError, match=r"has 24 bytes; 480 were announced"):
        connect(make_pair("cuda_ipc", memory.metadata), None)


def test_a_device_in_trouble_is_a_failed_transfer():
    copies = ScriptedCopies()
    copies.fail = True
    target = as_blocks(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    connector = CudaConnector(make_cache(), target, copies, block_size=BLOCK_SIZE)

    with pytest.raises(TransferError, match="illegal memory access"):
        connector.save_kv_layer(0, [0], [0], 0, 4)
