"""Parts that generations of the settings share: made once, closed when the last generation that uses them has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

Made = TypeVar("Made")
Close = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """The closing of a part that has nothing to close."""


@dataclass(eq=False, slots=True)
class _Part:
    spec: object
    value: Any
    close: Close
    num_users: int = 0


class Parts:
    """Of the same specification the same part, and with it its connections, its health and what it has learnt."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def user(self) -> PartUser:
        return PartUser(self._parts)


class PartUser:
    """One generation. Nothing that it took is closed before its `close`."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._taken: list[_Part] = []

    def take(self, spec: object, make: Callable[[], tuple[Made, Close]]) -> Made:
        part = next((part for part in self._parts if part.spec == spec), None)
        if part is None:
            value, close = make()
            part = _Part(spec, value, close)
            self._parts.append(part)
        part.num_users += 1
        self._taken.append(part)
        found: Made = part.value
        return found

    async def close(self) -> None:
        """Give up what was taken, last taken first. What can't be closed keeps nothing else open."""
        taken, self._taken = self._taken, []
        async with AsyncExitStack() as ending:
            for part in taken:
                ending.push_async_callback(self._give_up, part)

    async def _give_up(self, part: _Part) -> None:
        part.num_users -= 1
        if part.num_users == 0:
            self._parts.remove(part)
            await part.close()
