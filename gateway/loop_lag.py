"""How late the event loop is: the time between when a timer was due and when it ran. What blocks the loop shows here.

Knows no requests and no metrics: each lateness goes to whoever asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.05  # more often would cost an idle gateway half a hundredth of a core
_MAX_MISSED = 500  # of one halt; a machine that slept for a night has missed millions


class LoopLag:
    """Measures from `start` to `stop`.

    A loop that stands still runs no timer, so a long halt would count as one lateness among many good ones. Each timer
    that would have been due within it therefore counts as well, as late as it would have been: the distribution is that
    of something that comes at any moment.
    """

    def __init__(self, observe: Callable[[float], object], interval_seconds: float = INTERVAL_SECONDS) -> None:
        """`observe` is given seconds, 0 or more."""
        self._observe = observe
        self._interval_seconds = interval_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._due = self._loop.time() + self._interval_seconds
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        for lateness in latenesses(max(0.0, self._loop.time() - self._due), self._interval_seconds):
            self._observe(lateness)
        self._wait()


def latenesses(late: float, interval: float) -> list[float]:
    """Of a timer that was late by so much, and of those due every `interval` seconds that never ran meanwhile."""
    num_missed = min(int(late / interval), _MAX_MISSED)
    return [late - interval * number for number in range(num_missed + 1)]
