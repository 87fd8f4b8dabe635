"""What a pair's answer waits for, and from when its decode server is timed: as it is asked, not as it sends headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from gateway.upstreams.base import Served
from gateway.upstreams.pd.legs import PrefillEnd
from gateway.upstreams.pd.response import SplitAnswer

STREAM = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'


class Stream:
    """A decode server's answer whose headers came with its first output."""

    def __init__(self, data: bytes = STREAM) -> None:
        self._data = data

    status = 200
    headers: Mapping[str, str] = MappingProxyType({"Content-Type": "text/event-stream"})

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._data

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
        on_failure=lambda side, error, is_shared: None,
        on_close=lambda is_complete, both_ended: None,
    )
    out = b"".join([chunk async for chunk in answer.chunks()])
    await answer.close()

    assert out == STREAM
    assert served.decode_first_seconds is not None
    assert served.decode_first_seconds >= 100


def frames(usage: str, number: int) -> bytes:
    return (
        b"".join(b'data: {"choices":[],"usage":%s}\n\n' % usage.encode() for _ in range(number)) + b"data: [DONE]\n\n"
    )


async def read_beside_an_endless_prefill(data: bytes) -> bytes:
    prefill: asyncio.Future[PrefillEnd] = asyncio.get_running_loop().create_future()
    answer = SplitAnswer(
        Stream(data),
        prefill,
        Served(),
        handoff_seconds=60,
        asked_at=0,
        on_first=lambda: None,
        on_failure=lambda side, error, is_shared: None,
        on_close=lambda is_complete, both_ended: ended.append(both_ended),
    )
    async with asyncio.timeout(20):
        out = b"".join([chunk async for chunk in answer.chunks()])
    await answer.close()
    return out


ended: list[bool] = []


async def test_a_server_that_says_usage_null_with_every_token_is_not_held_up_by_the_prefill(monkeypatch):
    monkeypatch.setattr("gateway.upstreams.pd.response._USAGE_SECONDS", 1000)
    data = frames("null", 3)
    assert await read_beside_an_endless_prefill(data) == data


async def test_pd_11_one_that_counts_with_every_token_waits_for_a_slow_prefill_once(monkeypatch):
    monkeypatch.setattr("gateway.upstreams.pd.response._USAGE_SECONDS", 0.05)
    out = await read_beside_an_endless_prefill(frames('{"prompt_tokens_details":{"cached_tokens":9}}', 2000))
    assert out == frames('{"prompt_tokens_details":null}', 2000)


async def test_an_answer_whose_prefill_goes_on_has_not_ended_at_both_servers():
    ended.clear()
    await read_beside_an_endless_prefill(STREAM)
    assert ended == [False]
