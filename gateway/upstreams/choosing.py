"""What an upstream of several alike instances asks of whoever chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.core.types import ChatRequest

InstanceId = tuple[str, int]  # name and process


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
