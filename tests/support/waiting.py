"""Waiting for a fact, not for a time: asked again and again where nothing tells of a change, up to a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

DEADLINE_SECONDS = 20.0
_TURN_SECONDS = 0.002

T = TypeVar("T")


async def until(condition: Callable[[], object], what: str = "the condition holds") -> None:
    """For conditions of objects that have no event."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - see above
                await asyncio.sleep(_TURN_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_SECONDS} s: {what}") from None


async def until_told(ask: Callable[[], Awaitable[T]], is_wanted: Callable[[T], object]) -> T:
    """The first wanted answer of one who must be asked, such as a server."""
    told: list[T] = []
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not told or not is_wanted(told[-1]):
                if told:
                    await asyncio.sleep(_TURN_SECONDS)
                told[:] = [await ask()]
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_SECONDS} s; told last: {told}") from None
    return told[0]
