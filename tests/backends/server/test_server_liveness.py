"""Heartbeats: sent while the engine thread lives, in however long a step; not by a thread that is stuck."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from backends.engines.base import PeerId
from backends.protocol.framing import Decoder, Encoder
from backends.protocol.messages import FromPrefill, Heartbeat, ToPrefill
from backends.server.engine_thread import EngineThread, Liveness, Outlet, Pulse
from backends.server.peer_line import PeerLine
from support.gateway_process import wait_until

WAIT_SECONDS = 20


def test_a_thread_that_waits_for_work_is_alive():
    assert all(moves([Pulse(True, 7, 1.0)] * 3))


def test_a_thread_that_neither_waits_nor_moves_is_not():
    stuck = Pulse(False, 7, 1.0)

    assert moves([stuck, stuck, stuck]) == [True, False, False]


@pytest.mark.parametrize(
    "pulses", [[Pulse(False, 7, 1.0), Pulse(False, 8, 1.0)], [Pulse(False, 7, 1), Pulse(False, 7, 2)]]
)
def test_a_thread_that_goes_on_or_computes_is_alive(pulses: list[Pulse]):
    assert all(moves(pulses))


def moves(pulses: list[Pulse]) -> list[bool]:
    said = iter(pulses)
    liveness = Liveness(lambda: next(said))
    return [liveness.moved() for _ in pulses]


class OneStep:
    """An engine whose only step does what a test says."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.begun = threading.Event()
        self._done = False

    def step(self) -> bool:
        if self._done:
            return False
        self._done = True
        self.begun.set()
        self._work()
        return True

    def next_deadline(self) -> float | None:
        return None

    def num_unfinished(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.fixture
def end() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def start(engine: OneStep) -> EngineThread:
    thread = EngineThread(lambda _: None)
    thread.start(lambda: engine)
    assert engine.begun.wait(WAIT_SECONDS)
    return thread


def test_a_long_step_that_computes_is_no_hang(end: threading.Event):
    def compute() -> None:
        while not end.is_set():
            pass

    liveness = Liveness(start(OneStep(compute)).pulse)
    for _ in range(3):
        wait_until(liveness.moved, "the thread computes", WAIT_SECONDS)


def test_a_step_that_is_stuck_shows_and_the_idle_thread_after_it_lives(end: threading.Event):
    thread = start(OneStep(lambda: end.wait(WAIT_SECONDS) and None))
    liveness = Liveness(thread.pulse)
    wait_until(lambda: not liveness.moved(), "the thread is stuck", WAIT_SECONDS)
    assert not liveness.moved()
    end.set()
    wait_until(lambda: thread.pulse().is_waiting, "it waits for work", WAIT_SECONDS)
    assert liveness.moved()


class ThreadDouble(EngineThread):
    """Where it is, a test says."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__(lambda _: None)
        self._pulse = pulse

    def pulse(self) -> Pulse:
        return self._pulse


async def open_line(pulse: Pulse, lease_seconds: float) -> tuple[PeerLine[ToPrefill], socket.socket, asyncio.Event]:
    ours, theirs = socket.socketpair()
    hung = asyncio.Event()
    line: PeerLine[ToPrefill] = PeerLine(PeerId("p", 1), ThreadDouble(pulse), lease_seconds, hung.set)
    await line.open(ours, ToPrefill, received=lambda _: None, lost=lambda _: None)
    theirs.setblocking(False)
    return line, theirs, hung


async def test_a_living_engine_is_told_and_a_silent_peer_is_given_up_once():
    line, theirs, hung = await open_line(Pulse(True, 1, 0.0), 0.15)
    async with asyncio.timeout(WAIT_SECONDS):
        await hung.wait()
        data = await asyncio.get_running_loop().sock_recv(theirs, 4096)

    assert all(isinstance(message, Heartbeat) for message in Decoder[FromPrefill](FromPrefill).feed(data))
    line.close()
    theirs.close()


async def test_a_peer_given_up_still_hears_that_the_engine_lives_until_the_line_closes():
    line, theirs, hung = await open_line(Pulse(True, 1, 0.0), 0.15)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_SECONDS):
        await hung.wait()
        await loop.sock_recv(theirs, 4096)  # what was said until then
        hung.clear()
        line.judge_no_more()
        for _ in range(4):
            assert await loop.sock_recv(theirs, 4096)
        line.close()
        while await loop.sock_recv(theirs, 4096):
            pass

    assert not hung.is_set()
    theirs.close()


async def test_a_stuck_engine_says_nothing_and_still_judges_its_peer():
    line, theirs, hung = await open_line(Pulse(False, 1, 0.0), 0.15)
    line._liveness.moved()  # from now on it doesn't move
    async with asyncio.timeout(WAIT_SECONDS):
        await hung.wait()

    with pytest.raises(BlockingIOError):
        theirs.recv(4096)
    line.close()
    theirs.close()


async def test_whatever_the_peer_says_renews_its_lease():
    line, theirs, hung = await open_line(Pulse(True, 1, 0.0), 0.3)
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(WAIT_SECONDS):
        while loop.time() < started + 0.9:  # three leases long, as told by our own heartbeats
            await loop.sock_recv(theirs, 4096)
            await loop.sock_sendall(theirs, Encoder().encode(Heartbeat()))
        assert not hung.is_set()
        await hung.wait()

    line.close()
    theirs.close()


async def test_after_the_last_word_the_other_end_is_still_heard():
    line, theirs, _ = await open_line(Pulse(True, 1, 0.0), 60.0)
    lost = asyncio.Event()
    assert line._link is not None
    line._link._lost = lambda _: lost.set()
    line.finish()
    line.outlet._write(b"never sent")
    async with asyncio.timeout(WAIT_SECONDS):
        assert await asyncio.get_running_loop().sock_recv(theirs, 4096) == b""
        assert not lost.is_set()
        theirs.close()
        await lost.wait()

    line.close()
    assert isinstance(line.outlet, Outlet)
