"""KV by NIXL: exactly the named slots, a peer that is gone is an error, and the pool can be reached after a restart.

With an agent that writes by itself; and with the library where it is installed, across processes.
"""

import threading

import pytest
import torch
from hypothesis import given, settings
from kv_helpers import (
    BLOCK_SIZE,
    LAYOUT,
    SLOT_BYTES,
    Copy,
    ScriptedAgent,
    as_blocks,
    copied,
    make_cache,
    make_pair,
    some_copies,
)

from backends.kv_transfer.base import TransferError
from backends.kv_transfer.nixl import NixlConnector, NixlKVMemory, NixlSource

DEADLINE = 10.0


def make_memory() -> tuple[NixlKVMemory, torch.Tensor]:
    pool = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    return NixlKVMemory(pool, make_agent=ScriptedAgent), pool


def make_source(cache: torch.Tensor) -> NixlSource:
    return NixlSource(cache, block_size=BLOCK_SIZE, make_agent=ScriptedAgent)


def agent_of(source: NixlSource) -> ScriptedAgent:
    assert isinstance(source.agent, ScriptedAgent)
    return source.agent


@settings(max_examples=100, derandomize=True, deadline=None)
@given(copy=some_copies())
def test_nixl_moves_exactly_the_named_slots(copy: Copy):
    source_ids, target_ids, start, stop = copy
    cache, (memory, pool) = make_cache(), make_memory()
    connector = make_source(cache).connect(make_pair("nixl", memory.metadata), None)

    for layer in (1, 0):
        expected = copied(as_blocks(pool), cache, layer, source_ids, target_ids, start, stop)
        num_bytes = connector.save_kv_layer(layer, source_ids, target_ids, start, stop)
        assert num_bytes == 2 * (stop - start) * SLOT_BYTES
        assert torch.equal(as_blocks(pool), expected)


def test_consecutive_blocks_are_one_piece_for_k_and_one_for_v():
    cache, (memory, _) = make_cache(), make_memory()
    source = make_source(cache)
    connector = source.connect(make_pair("nixl", memory.metadata), None)
    assert isinstance(connector, NixlConnector)

    (pieces,) = {connector._parts.plan([3, 4, 5], [2, 3, 4], 1, 12).sizes.size}
    assert pieces == 2  # the rest of the first block, and two whole blocks


def test_a_failure_ends_the_connection_and_the_next_write_makes_another():
    cache, (memory, pool) = make_cache(), make_memory()
    source = make_source(cache)
    connector = source.connect(make_pair("nixl", memory.metadata), None)
    agent_of(source).fail = TransferError("the other end is gone")

    for num_ended in (1, 2):
        with pytest.raises(TransferError, match="the other end is gone"):
            connector.save_kv_layer(0, [0], [0], 0, 4)
        assert len(agent_of(source).disconnected) == num_ended
    agent_of(source).fail = None
    connector.save_kv_layer(0, [0], [5], 0, 4)
    connector.close()

    assert torch.equal(as_blocks(pool)[0, :, 5], cache[0, :, 0])
    assert len(agent_of(source).disconnected) == 3


def test_the_connection_ends_only_after_other_writes_have():
    memory, _ = make_memory()
    source = make_source(make_cache())
    agent = agent_of(source)
    connector = source.connect(make_pair("nixl", memory.metadata), None)
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(DEADLINE)

    agent.before_write = hold
    writer = threading.Thread(target=connector.save_kv_layer, args=(0, [0], [0], 0, 4), daemon=True)
    writer.start()
    assert entered.wait(DEADLINE)
    closer = threading.Thread(target=connector.close, daemon=True)
    closer.start()
    closer.join(0.05)

    assert closer.is_alive()
    assert agent.disconnected == []
    leave.set()
    writer.join(DEADLINE)
    closer.join(DEADLINE)
    assert len(agent.disconnected) == 1


def test_memory_that_cannot_be_reached_is_refused_when_pairing():
    memory, _ = make_memory()
    source = make_source(make_cache())
    with pytest.raises(ValueError, match="metadata can't be read"):
        source.connect(make_pair("nixl", b"\xc1"), None)
    agent_of(source).fail = TransferError("no way")
    with pytest.raises(TransferError, match="no way"):
        source.connect(make_pair("nixl", memory.metadata), None)
    assert len(agent_of(source).disconnected) == 1

    metadata = memory.metadata
    memory.close()
    memory.close()  # once more does nothing
    with pytest.raises(TransferError, match="is unknown"):
        source.connect(make_pair("nixl", metadata), None)


def test_a_restarted_decode_side_has_another_name_and_is_reached():
    cache = make_cache()
    source = make_source(cache)
    first, _ = make_memory()
    source.connect(make_pair("nixl", first.metadata), None).close()
    first.close()
    second, pool = make_memory()

    connector = source.connect(make_pair("nixl", second.metadata), None)
    connector.save_kv_layer(0, [0], [9], 0, 4)

    assert len(set(ScriptedAgent.names)) == len(ScriptedAgent.names)
    assert torch.equal(as_blocks(pool)[0, :, 9], cache[0, :, 0])


def test_closing_takes_back_what_was_registered():
    before = len(ScriptedAgent.registered)
    memory, _ = make_memory()
    assert len(ScriptedAgent.registered) == before + 2
    assert (memory.backend, memory.fd, memory.num_bytes) == ("nixl", -1, LAYOUT.num_bytes)
    memory.prefault([1])

    memory.close()

    assert len(ScriptedAgent.registered) == before
