"""SIGHUP from the first moment on. Knows nothing of what is read again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable


class ReloadSignal:
    """One that comes before there is anything to read again ends nothing, and is heeded then."""

    def __init__(self) -> None:
        self._came_early = False
        with contextlib.suppress(AttributeError, ValueError):  # Windows knows no such signal; threads may set none
            signal.signal(signal.SIGHUP, self._remember)

    def _remember(self, *_: object) -> None:
        self._came_early = True

    def heed(self, ask: Callable[[], object]) -> None:
        """From now on it calls `ask`, within the running loop."""
        with contextlib.suppress(NotImplementedError, AttributeError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, ask)
        if self._came_early:
            ask()
