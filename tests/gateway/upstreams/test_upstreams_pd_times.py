"""When the time of a pair's decode server begins: as it is asked, and not when it sends its headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from gateway.upstreams.base import Served
from gateway.upstreams.pd_legs import PrefillEnd
from gateway.upstreams.pd_response import SplitAnswer

STREAM = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'


class Stream:
    """A decode server's answer whose headers came with its first output."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({"Content-Type": "text/event-stream"})

    async def chunks(self) -> AsyncIterator[bytes]:
        yield STREAM

    async def close(self) -> None:
        """Nothing is open."""


async def test_decode_first_counts_from_asking_the_decode_server():
    prefill: asyncio.Future[PrefillEnd] = asyncio.get_running_loop().create_future()
    prefill.set_result(PrefillEnd(200, {}, b"{}", 0.5))
    served = Served()
    answer = SplitAnswer(
        Stream(),
        prefill,
        served,
        handoff_seconds=60,
        asked_at=time.monotonic() - 100,
        on_first=lambda: None,
        on_failure=lambda side: None,
        on_close=lambda is_complete: None,
    )
    out = b"".join([chunk async for chunk in answer.chunks()])
    await answer.close()

    assert out == STREAM
    assert served.decode_first_seconds is not None
    assert served.decode_first_seconds >= 100
