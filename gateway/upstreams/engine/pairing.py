"""When to connect one prefill instance with one decode instance. Pure; the sockets are `pairs`'."""

from __future__ import annotations

FIRST_RETRY_SECONDS = 0.2
LONGEST_RETRY_SECONDS = 10.0
WAITING_FOR_BOTH = "waiting for both sides of the split engine"


class Pairing:
    """Whether the two sides are connected, and when to try again. `deadline` is when it wants to be asked.

    `engaged` holds from the moment at which these two processes were given a connection until its end is reported.
    """

    def __init__(self) -> None:
        self.connected = False
        self.engaged = False
        self.reason = WAITING_FOR_BOTH
        self.deadline: float | None = None
        self._sides: tuple[int, int] | None = None
        self._num_failures = 0

    def sides(self, pids: tuple[int, int] | None, now: float) -> None:
        """Both sides are up as these processes, or one of them is not."""
        if pids == self._sides:
            return
        self._sides = pids
        self._num_failures = 0
        self.connected = self.engaged = False
        self.reason = WAITING_FOR_BOTH if pids is None else "the two sides are being connected"
        self.deadline = None if pids is None else now

    def reported(self, connected: bool, reason: str, now: float) -> None:
        """What the decode side says of its connection."""
        self.connected = self.engaged = connected and self._sides is not None
        self.deadline = None
        if self.connected:
            self.reason = ""
            self._num_failures = 0
            return
        self.reason = reason or "the connection of the two sides ended"
        if self._sides is not None:
            delay = FIRST_RETRY_SECONDS * 2**self._num_failures
            self.deadline = now + min(delay, LONGEST_RETRY_SECONDS)
            self._num_failures += 1

    def due(self, now: float) -> bool:
        """True once for each time that the two should be connected now."""
        if self.deadline is None or now < self.deadline:
            return False
        self.deadline = None
        self.engaged = True
        return True
