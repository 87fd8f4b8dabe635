"""What an upstream of several alike instances asks of whoever chooses among them, and of whoever knows the ill ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.core.errors import GatewayError
from gateway.core.types import ChatRequest, InstanceId


class Assignment(Protocol):
    """A request at its instance."""

    @property
    def instance(self) -> InstanceId: ...

    @property
    def reason(self) -> str: ...

    def first_token(self) -> None: ...

    def done(self) -> None: ...


class Chooser(Protocol):
    """Chooses among instances that are there. Learns from what it has chosen."""

    def choose(self, instances: Sequence[InstanceId], request: ChatRequest) -> Assignment: ...


class Visit(Protocol):
    """A request at a server, as far as it says whether that is well. The first end that is told counts."""

    def answered(self) -> None:
        """The server has taken it."""

    def ended(self, error: GatewayError | None = None) -> None:
        """None = well. Whether an error is the server's own fault is for whoever listens to know."""

    def left(self) -> None:
        """It ended, and that says nothing of the server: the client has gone, or another server has failed."""


class Breaker(Protocol):
    """Whether one server is worth asking, judged by what became of requests there."""

    @property
    def state(self) -> str:
        """closed, half_open or open."""

    @property
    def num_failures(self) -> int:
        """In a row."""

    @property
    def last_failure(self) -> str:
        """Why the last request that says something failed; empty = it did not."""

    def wait_seconds(self) -> float:
        """0 = `admit` would let a request in."""

    def admit(self) -> Visit | None:
        """None while nothing may go."""

    def recovered(self) -> None:
        """It is known to be another process."""
