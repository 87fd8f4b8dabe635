"""Real processes of a split engine, with the scripted engine: pairing by name, several peers, hanging, loss."""

from __future__ import annotations

import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from backends.config import EngineConfig
from backends.engines.scripted import Script, scripted_info
from backends.protocol.framing import Decoder, Encoder
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FromPrefill,
    GetStats,
    Heartbeat,
    Pair,
    Paired,
    PairRefused,
    PeerState,
    Prefill,
    Prefilled,
    Ready,
    SamplingParams,
    StatsReport,
)
from support.engine_child import DEADLINE_SECONDS, EngineChild, engine_child

SHORT_LEASE_SECONDS = 0.6


@contextmanager
def instances(*configs: dict[str, Any]) -> Iterator[list[EngineChild]]:
    with ExitStack() as stack:
        children = [stack.enter_context(engine_child(**config)) for config in configs]
        for child in children:
            child.read_until(Ready)
        yield children


def connect(decode: EngineChild, prefill: EngineChild, *, decode_name: str = "decode", name: str = "prefill") -> None:
    """As the gateway does: each gets one end, and beside it the other's name."""
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(decode.control, [name.encode()], [one.fileno()])
        socket.send_fds(prefill.control, [decode_name.encode()], [other.fileno()])


def decode_info() -> EngineInfo:
    config = EngineConfig(role="decode", model="scripted")
    return scripted_info(config, Script())


def stats_of(child: EngineChild, role: str, number: int = 1) -> EngineStats:
    child.send(GetStats(number=number))
    stats: EngineStats = child.read_until(StatsReport).stats[role]
    return stats


def test_a_decode_side_without_a_prefill_side_refuses_requests():
    with instances({"role": "decode"}) as (decode,):
        decode.generate("r")
        assert decode.read_until(Failed).code == "peer_lost"


def test_an_instance_is_called_by_its_name_or_else_by_its_role():
    with engine_child(role="prefill", name="prefill-3") as named, engine_child(role="decode") as plain:
        assert named.read_until(Ready).info.name == "prefill-3"
        assert plain.read_until(Ready).info.name == "decode"


@pytest.mark.parametrize(
    ("decode", "prefill", "differs"),
    [
        ({"block_size": 16}, {"block_size": 32}, "block_size"),
        ({"transfer_backend": "nixl"}, {"transfer_backend": "local"}, "transfer_backend"),
    ],
)
def test_sides_that_differ_do_not_pair_and_say_what_differs(
    decode: dict[str, Any], prefill: dict[str, Any], differs: str
):
    with instances({"role": "decode"} | decode, {"role": "prefill"} | prefill) as (one, other):
        connect(one, other, name="prefill-1")
        state = one.read_until(PeerState)

        assert not state.connected
        assert state.peer == "prefill-1"
        assert differs in state.reason


def test_requests_are_spread_over_two_prefill_sides_and_each_is_told_of_by_name():
    sides = ({"role": "prefill", "model": "scripted:delay=0.05"},) * 2
    with instances({"role": "decode"}, *sides) as (decode, *prefills):
        for number, prefill in enumerate(prefills):
            connect(decode, prefill, name=f"prefill-{number}")
        states = [decode.read_until(PeerState) for _ in prefills]
        assert {(state.connected, state.peer) for state in states} == {(True, "prefill-0"), (True, "prefill-1")}
        for number in range(6):
            decode.generate(f"r{number}", max_tokens=1)
        done = {decode.read_until(Done).request_id for _ in range(6)}

        assert done == {f"r{number}" for number in range(6)}
        assert [stats_of(prefill, "prefill").num_steps for prefill in prefills] == [3, 3]


def test_one_prefill_side_serves_two_decode_sides():
    with instances({"role": "decode"}, {"role": "decode"}, {"role": "prefill"}) as (one, two, prefill):
        for number, decode in enumerate((one, two)):
            connect(decode, prefill, decode_name=f"decode-{number}")
            assert decode.read_until(PeerState).connected
        for decode in (one, two):
            decode.generate("same-id", max_tokens=1)
        for decode in (one, two):
            assert decode.read_until(Done).request_id == "same-id"
        one.process.kill()
        one.process.wait()
        two.generate("after", max_tokens=1)
        assert two.read_until(Done).request_id == "after"


def test_a_new_connection_of_a_name_takes_the_place_of_the_old():
    with instances({"role": "decode"}, {"role": "prefill"}, {"role": "prefill"}) as (decode, old, new):
        connect(decode, old)
        assert decode.read_until(PeerState).connected
        connect(decode, new)
        replaced = decode.read_until(PeerState)
        assert (replaced.connected, replaced.hung) == (False, False)
        assert "took its place" in replaced.reason
        assert decode.read_until(PeerState).connected
        old.process.kill()
        old.process.wait()
        decode.generate("r", max_tokens=1)
        assert decode.read_until(Done).request_id == "r"


def test_the_same_two_sides_may_be_connected_anew():
    with instances({"role": "decode"}, {"role": "prefill"}) as (decode, prefill):
        for number in range(3):
            connect(decode, prefill)
            while not decode.read_until(PeerState).connected:
                pass
            decode.generate(f"r{number}", max_tokens=1)
            assert decode.read_until(Done).request_id == f"r{number}"


def test_a_replaced_side_gives_its_blocks_back_once_it_has_let_go():
    """It is asked to let go, is in a step, and answers by the end of its connection."""
    slow = {"role": "prefill", "model": "scripted:delay=0.3"}
    with instances({"role": "decode"}, slow, {"role": "prefill"}) as (decode, old, new):
        connect(decode, old)
        assert decode.read_until(PeerState).connected
        decode.generate("r")
        decode.read_until(Accepted)
        connect(decode, new)
        assert decode.read_until(Failed).code == "peer_lost"
        while not decode.read_until(PeerState).connected:
            pass
        while stats_of(decode, "decode").num_blocks_in_use:
            pass  # the test's own time limit ends this
        assert stats_of(old, "prefill").num_waiting == 0


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_a_stopped_prefill_side_is_told_as_hung_its_requests_end_and_its_blocks_come_back_with_its_end():
    lease = {"lease_seconds": SHORT_LEASE_SECONDS}
    with instances({"role": "decode"} | lease, {"role": "prefill"}) as (decode, prefill):
        connect(decode, prefill, name="prefill-7")
        assert decode.read_until(PeerState).connected
        prefill.process.send_signal(signal.SIGSTOP)
        decode.generate("r")
        decode.read_until(Accepted)
        state = decode.read_until(PeerState)
        assert (state.connected, state.hung, state.peer) == (False, True, "prefill-7")
        failed = decode.read_until(Failed)
        assert (failed.request_id, failed.code) == ("r", "peer_lost")
        assert "said nothing for 0.6 seconds" in state.reason
        assert stats_of(decode, "decode").num_blocks_in_use > 0

        prefill.process.kill()  # the gateway does
        prefill.process.wait()
        state = decode.read_until(PeerState)
        assert (state.connected, state.hung) == (False, False)
        assert stats_of(decode, "decode").num_blocks_in_use == 0


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_a_stopped_prefill_side_that_goes_on_lets_go_of_its_blocks_by_itself():
    lease = {"lease_seconds": SHORT_LEASE_SECONDS}
    with instances({"role": "decode"} | lease, {"role": "prefill"}) as (decode, prefill):
        connect(decode, prefill)
        assert decode.read_until(PeerState).connected
        prefill.process.send_signal(signal.SIGSTOP)
        decode.generate("r")
        assert decode.read_until(PeerState).hung
        prefill.process.send_signal(signal.SIGCONT)
        assert not decode.read_until(PeerState).hung  # its end of the connection closed
        assert stats_of(decode, "decode").num_blocks_in_use == 0
        connect(decode, prefill)
        while not decode.read_until(PeerState).connected:
            pass
        decode.generate("after", max_tokens=1)
        assert decode.read_until(Done).request_id == "after"


@pytest.mark.skipif(sys.platform != "linux", reason="stops a process")
def test_a_prefill_side_drops_a_stopped_decode_side_which_can_come_back():
    lease = {"lease_seconds": SHORT_LEASE_SECONDS}
    with instances({"role": "decode"} | lease, {"role": "prefill"}) as (decode, prefill):
        connect(decode, prefill)
        assert decode.read_until(PeerState).connected
        decode.process.send_signal(signal.SIGSTOP)
        prefill.read_log_until("hangs")
        decode.process.send_signal(signal.SIGCONT)
        state = decode.read_until(PeerState)
        assert (state.connected, state.hung) == (False, False)
        connect(decode, prefill)
        while not decode.read_until(PeerState).connected:
            pass
        decode.generate("after", max_tokens=1)
        assert decode.read_until(Done).request_id == "after"


def test_an_idle_pair_outlives_many_leases():
    lease = {"lease_seconds": 0.2}
    with instances({"role": "decode"} | lease, {"role": "prefill"}) as (decode, prefill):
        connect(decode, prefill)
        assert decode.read_until(PeerState).connected
        with DecodeDouble(prefill, lease_seconds=0.2) as ours:
            for _ in range(12):  # heartbeats of another pair tell the time
                assert isinstance(ours.read(), Heartbeat)
                ours.send(Heartbeat())
        decode.generate("r", max_tokens=1)
        assert decode.read_until(Done).request_id == "r"


class DecodeDouble:
    """The decode side's end of a connection, spoken by the test."""

    def __init__(self, prefill: EngineChild, **pair: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(prefill.control, [b"double"], [theirs.fileno()])
        self._sock = ours
        self._decoder: Decoder[FromPrefill] = Decoder(FromPrefill)
        self._unread: list[FromPrefill] = []
        with tempfile.TemporaryFile() as memory:
            memory.truncate(4096)
            message = Pair(**({"info": decode_info(), "kv_memory_bytes": 4096} | pair))
            socket.send_fds(ours, [Encoder().encode(message)], [memory.fileno()])
        ours.settimeout(DEADLINE_SECONDS)
        self.answer = self.read()

    def read(self) -> FromPrefill:
        while not self._unread:
            data = self._sock.recv(65536)
            assert data, "the prefill side closed the connection"
            self._unread += self._decoder.feed(data)
        return self._unread.pop(0)

    def read_to_the_end(self) -> None:
        while self._sock.recv(65536):
            pass

    def send(self, message: Any) -> None:
        self._sock.sendall(Encoder().encode(message))

    def __enter__(self) -> DecodeDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def half_close(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)


def test_a_decode_side_of_another_version_is_refused_by_the_prefill_side():
    with instances({"role": "prefill"}) as (prefill,), DecodeDouble(prefill, protocol_version=99) as ours:
        answer = ours.answer

    assert isinstance(answer, PairRefused)
    assert "version 99" in answer.reason


def test_a_prefill_side_says_that_it_is_alive_and_drops_who_says_nothing():
    lease = {"lease_seconds": SHORT_LEASE_SECONDS}
    with instances({"role": "prefill"}) as (prefill,), DecodeDouble(prefill, **lease) as ours:
        assert isinstance(ours.answer, Paired)
        assert isinstance(ours.read(), Heartbeat)
        ours.read_to_the_end()


def test_an_introduction_without_a_descriptor_reaches_the_engine():
    with instances({"role": "prefill"}) as (prefill,):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(prefill.control, [b"double"], [theirs.fileno()])
            theirs.close()
            frames = Encoder().encode(Pair(info=decode_info(), kv_memory_bytes=4096)) + Encoder().encode(Heartbeat())
            ours.sendall(frames)  # what follows at once is not lost
            ours.settimeout(DEADLINE_SECONDS)
            (answer,) = Decoder(FromPrefill).feed(ours.recv(65536))

    assert isinstance(answer, PairRefused)
    assert "KV memory" in answer.reason


def test_a_prefill_side_closes_its_end_only_once_it_has_let_go():
    """What it was asked before its peer finished is dropped; a step that runs is answered first."""
    slow = {"role": "prefill", "model": "scripted:delay=0.2"}
    with instances(slow) as (prefill,), DecodeDouble(prefill) as ours:
        prompt = {"sampling": SamplingParams(), "cache": CacheParams(), "transfer_mode": "layer", "seed": 1}
        for name in ("runs", "waits"):
            ours.send(Prefill(request_id=name, token_ids=[1, 2], block_ids=[0], **prompt))
        ours.read()  # it has started the first
        ours.half_close()
        last = ours.read()
        assert isinstance(last, Prefilled)
        assert last.request_id == "runs"
        ours.read_to_the_end()
        assert stats_of(prefill, "prefill").num_waiting == 0
