"""How many requests a server has at once, and who waits for one. In memory only; knows no servers.

A decode server reserves KV for a request before its prefill is over. Without a limit here, more requests than it can
hold would wait in it, each with a prefill's KV parked on the other side, until the engines' own timeouts end all.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.errors import GatewayError, Overloaded

# Chooses among the servers for which `has_room` is true. None: all have enough to do. Raises if there are none at all.
Choose = Callable[[Callable[[str], bool]], str | None]


@dataclass(slots=True)
class Slot:
    """A place at one server, until it is released. Releasing it twice does nothing."""

    name: str
    _admission: Admission | None

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.give_back(self.name)


@dataclass(slots=True, eq=False)
class _Waiter:
    choose: Choose
    slot: asyncio.Future[Slot]
    is_particular: bool


class Admission:
    """Of the servers of one side. First come, first served; but nobody waits for a place that only others can't take.

    `max_running` is of each server; None = any number.
    """

    def __init__(self, side: str, *, max_running: int | None, max_waiting: int, timeout_seconds: float) -> None:
        self._side = side
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._timeout_seconds = timeout_seconds
        self._running: Counter[str] = Counter()
        self._waiting: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_running(self, name: str) -> int:
        return self._running[name]

    async def enter(self, choose: Choose, *, is_particular: bool = False) -> Slot:
        """A place, at once or after a wait. Raises Overloaded, or what `choose` raises.

        One who is particular can't use every server: it may wait while others find a place.
        """
        nobody_is_passed = all(waiter.is_particular for waiter in self._waiting)
        if nobody_is_passed and (name := choose(self._has_room)) is not None:
            return self._take(name)
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"All {self._side} servers are busy, and {len(self._waiting)} requests wait already. Try again.",
                retry_after_seconds=1,
            )
        waiter = _Waiter(choose, asyncio.get_running_loop().create_future(), is_particular)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await waiter.slot
        except BaseException as error:
            self._leave(waiter)
            if not isinstance(error, TimeoutError):
                raise
            message = f"No {self._side} server had room within {self._timeout_seconds:g} s. Try again."
            raise Overloaded(message, retry_after_seconds=self._timeout_seconds) from None

    def _leave(self, waiter: _Waiter) -> None:
        """Whoever leaves in the moment in which a place was found gives it to the next."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.serve()
        elif waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
            waiter.slot.result().release()

    def give_back(self, name: str) -> None:
        self._running[name] -= 1
        self.serve()

    def serve(self) -> None:
        """Give places to those who wait, as far as there are any. Also called when a server has come back."""
        for waiter in list(self._waiting):
            if not self._is_served(waiter):
                if not waiter.is_particular:
                    return  # what it can't have, those behind it can't either
                continue
            self._waiting.remove(waiter)

    def _is_served(self, waiter: _Waiter) -> bool:
        """Whether it need not wait any more: it has a place, an error, or has left."""
        if waiter.slot.done():
            return True
        try:
            name = waiter.choose(self._has_room)
        except GatewayError as error:
            waiter.slot.set_exception(error)
            return True
        if name is None:
            return False
        waiter.slot.set_result(self._take(name))
        return True

    def _has_room(self, name: str) -> bool:
        return self._max_running is None or self._running[name] < self._max_running

    def _take(self, name: str) -> Slot:
        self._running[name] += 1
        return Slot(name, self)
