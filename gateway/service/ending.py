"""The end of an upstream's stream: what comes after an answer is complete may be lost, and isn't waited for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from gateway.core.errors import UpstreamGone, UpstreamTimeout

GRACE_SECONDS = 5.0  # for usage and the end mark, which servers send at once


async def until_end(chunks: AsyncIterator[bytes], is_complete: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The chunks, up to the stream's end. Once the answer is complete, a break or this much more time is its end too.

    `is_complete` may become false again: of several choices one may begin after the others have ended.
    """
    async for chunk in chunks:  # nearly all of them, without a timer for each
        yield chunk
        if is_complete():
            break
    else:
        return
    loop = asyncio.get_running_loop()
    ends_at: float | None = loop.time() + GRACE_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(ends_at):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except (UpstreamGone, UpstreamTimeout, TimeoutError):
            if ends_at is None:
                raise
            return
        yield chunk
        ends_at = (ends_at or loop.time() + GRACE_SECONDS) if is_complete() else None
