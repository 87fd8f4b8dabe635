"""How many requests may begin in one turn of the event loop. Many at once would hold up all that are being answered.

Knows no requests: whoever wants in waits for a turn with room.
"""

from __future__ import annotations

import asyncio
from collections import deque

NUM_PER_TURN = 16  # each takes a quarter of a millisecond up to its upstream


class TurnLimit:
    """Lets so many in within one turn of the loop, and the others in the turns after it, in the order they came."""

    def __init__(self, num_per_turn: int = NUM_PER_TURN) -> None:
        self._num_per_turn = num_per_turn
        self._num_left = num_per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def enter(self) -> None:
        """Waits only where this turn is full. Whoever is cancelled meanwhile takes no place."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._next_turn, loop)
        if self._num_left > 0:  # then nobody waits: the next turn's places go to those first
            self._num_left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        num_left = self._num_per_turn
        while self._waiting and num_left > 0:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                num_left -= 1
        self._num_left = num_left
        self._is_turning = num_left < self._num_per_turn
        if self._is_turning:
            loop.call_soon(self._next_turn, loop)
