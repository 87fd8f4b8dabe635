"""The one thread that owns an engine: runs what others ask for between steps, and steps while there is work.

Knows nothing of sockets: what the engine says is gathered in outlets, each written with one wake-up of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from backends.protocol.framing import Encoder

logger = logging.getLogger(__name__)

# An engine whose deadline has passed but that can't advance is asked again after this long, not in a busy loop.
SHORTEST_WAIT_SECONDS = 0.001


class Steppable(Protocol):
    """The verbs this thread needs of any engine."""

    def step(self) -> bool: ...

    def next_deadline(self) -> float | None: ...

    def num_unfinished(self) -> int: ...

    def close(self) -> None: ...


class Pulse(NamedTuple):
    """Where the engine thread is. It lives as long as this changes, or it has nothing to do."""

    is_waiting: bool
    num_rounds: int
    cpu_seconds: float  # grows within a step, however long that is, as long as it computes


class Liveness:
    """Whether the engine thread has moved since it was asked about last."""

    def __init__(self, pulse: Callable[[], Pulse]) -> None:
        self._pulse = pulse
        self._last: Pulse | None = None

    def moved(self) -> bool:
        last, self._last = self._last, self._pulse()
        return self._last.is_waiting or self._last != last


class Outlet:
    """Messages for one connection: added by the engine thread, written together by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, write: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._write = write
        self._encoder = Encoder()
        self._frames: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        self._frames.append(self._encoder.encode(message))

    def flush(self) -> None:
        if not self._frames:
            return
        frames = b"".join(self._frames)
        self._frames.clear()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self._write, frames)


class EngineThread:
    """Builds an engine and drives it until told to stop.

    `ended` is called in this thread, once: with None after a stop, with the exception that an engine let out otherwise.
    """

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._outlets: tuple[Outlet, ...] = ()
        self._stop_when_idle = False
        self._is_waiting = False
        self._num_rounds = 0
        self._cpu_clock: int | None = None
        self._thread: threading.Thread | None = None

    def start(self, build: Callable[[], Steppable]) -> None:
        self._thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the engine thread before its next step; any thread may ask."""
        with self._condition:
            self._inbox.append(call)
            self._condition.notify()

    def wake(self) -> None:
        """Let the engine step although nothing was posted; for helpers of the engine that finish in other threads."""
        self.post(_nothing)

    def add_outlet(self, outlet: Outlet) -> None:
        self._outlets = (*self._outlets, outlet)

    def remove_outlet(self, outlet: Outlet) -> None:
        self._outlets = tuple(known for known in self._outlets if known is not outlet)

    def pulse(self) -> Pulse:
        """Any thread may ask."""
        return Pulse(self._is_waiting and not self._inbox, self._num_rounds, self._cpu_seconds())

    def _cpu_seconds(self) -> float:
        """Of this thread, which takes part in all computing; of the whole process where the system can't tell."""
        if self._cpu_clock is None:
            return time.process_time()
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:  # the thread has ended
            return 0.0

    def stop_when_idle(self) -> None:
        """End the thread as soon as no request is left."""
        self.post(self._set_stop_when_idle)

    def _set_stop_when_idle(self) -> None:
        self._stop_when_idle = True

    def _run(self, build: Callable[[], Steppable]) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._drive(build())
        except BaseException as error:
            self._flush()
            self._ended(error)
        else:
            self._ended(None)

    def _drive(self, engine: Steppable) -> None:
        progressed = True
        while True:
            for call in self._take_calls(None if progressed else engine):
                call()
            self._flush()  # an admission must not wait for a long step
            if self._stop_when_idle and engine.num_unfinished() == 0:
                break
            progressed = engine.step()
            self._flush()
        engine.close()

    def _take_calls(self, idle_engine: Steppable | None) -> list[Callable[[], None]]:
        """What was posted. With an idle engine, wait until there is something or its deadline has come."""
        with self._condition:
            if idle_engine is not None and not self._inbox:
                self._is_waiting = True
                self._condition.wait(_seconds_until(idle_engine.next_deadline()))
                self._is_waiting = False
            calls, self._inbox = self._inbox, []
            self._num_rounds += 1
        return calls

    def _flush(self) -> None:
        for outlet in self._outlets:
            outlet.flush()


def _seconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return max(deadline - time.monotonic(), SHORTEST_WAIT_SECONDS)


def _nothing() -> None:
    pass
