"""How late the event loop is: the time between when a timer was due and when it ran. What blocks the loop shows here.

Knows no requests and no metrics: each lateness goes to whoever asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.1


class LoopLag:
    """Measures from `start` to `stop`, a few times a second."""

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
        self._observe(max(0.0, self._loop.time() - self._due))
        self._wait()
