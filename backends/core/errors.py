"""What the engine's core says no with. No torch, no sockets."""

from __future__ import annotations

from backends.protocol.messages import FailureCode


class PoolTooSmall(ValueError):
    """The memory for the KV cache doesn't hold one block; the message names the settings that give it more."""


class RequestRefused(Exception):
    """A request that can't be admitted: what happened, what was expected, what to do."""

    def __init__(self, code: FailureCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code: FailureCode = code
        self.param = param


def queue_full(num_waiting: int) -> RequestRefused:
    return RequestRefused(
        "queue_full", f"{num_waiting} requests are waiting already, the most allowed. Try again later."
    )
