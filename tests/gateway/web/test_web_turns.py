"""Many requests at once begin over several turns of the loop, in order, and none is lost."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.web.turns import TurnLimit


class Turns:
    """Counts the loop's turns, and in which each visitor came in."""

    def __init__(self, limit: TurnLimit) -> None:
        self.limit = limit
        self.number = 0
        self.entered: list[tuple[int, int]] = []  # visitor, turn
        self._on = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.number += 1
        if self._on:
            asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> None:
        self._on = False

    async def visit(self, visitor: int) -> None:
        await self.limit.enter()
        self.entered.append((visitor, self.number))


async def _visit(num_visitors: int, num_per_turn: int, leaving: frozenset[int] = frozenset()) -> Turns:
    turns = Turns(TurnLimit(num_per_turn))
    tasks = [asyncio.create_task(turns.visit(number)) for number in range(num_visitors)]
    await asyncio.sleep(0)
    for number in leaving:
        tasks[number].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    turns.stop()
    return turns


@given(num_visitors=st.integers(1, 60), num_per_turn=st.integers(1, 8), data=st.data())
def test_no_turn_lets_in_more_and_those_who_stay_come_in_order(num_visitors, num_per_turn, data):
    leaving = data.draw(st.frozensets(st.integers(0, num_visitors - 1)))
    turns = asyncio.run(_visit(num_visitors, num_per_turn, leaving))

    visitors, numbers = [visitor for visitor, _ in turns.entered], [number for _, number in turns.entered]
    assert visitors == sorted(visitors)
    assert {*range(num_visitors)} - leaving <= {*visitors}
    assert max((numbers.count(number) for number in numbers), default=0) <= num_per_turn


async def test_who_finds_room_does_not_wait_for_a_turn():
    turns = await _visit(3, num_per_turn=4)

    assert len({number for _, number in turns.entered}) == 1


async def test_room_comes_back_with_the_next_turn():
    limit = TurnLimit(2)
    for _ in range(3):
        await limit.enter()  # the third waits for a turn
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    turns = Turns(limit)
    await asyncio.gather(turns.visit(0), turns.visit(1))
    turns.stop()

    assert len({number for _, number in turns.entered}) == 1
