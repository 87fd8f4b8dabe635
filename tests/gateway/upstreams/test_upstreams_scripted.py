"""The double plays its script and remembers how each stream ended."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from gateway.core.errors import ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, Started
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.engine_upstream import make_request


async def test_a_script_is_played_for_every_request():
    upstream = ScriptedUpstream(words("a", "b"))
    request = make_request(CacheMode.SPLIT)

    assert [event async for event in upstream.stream(request)] == words("a", "b")
    assert [event async for event in upstream.stream(request)] == words("a", "b")
    assert upstream.finished == [request.request_id] * 2
    assert upstream.aborted == []


async def test_a_script_may_depend_on_the_request():
    upstream = ScriptedUpstream(lambda request: words(request.strategy.mode.value))

    assert [event async for event in upstream.stream(make_request(CacheMode.MERGED))] == words("merged")


async def test_an_error_is_raised_at_its_place():
    upstream = ScriptedUpstream([*words("a")[:2], UpstreamGone("gone")])
    events = upstream.stream(make_request(CacheMode.MERGED))

    assert [await anext(events), await anext(events)] == words("a")[:2]
    with pytest.raises(UpstreamGone):
        await anext(events)


async def test_a_stream_that_is_closed_early_counts_as_aborted():
    upstream = ScriptedUpstream([Started(1, 1), Pause(asyncio.Event())])
    request = make_request(CacheMode.MERGED)
    async with aclosing(upstream.stream(request)) as events:
        await anext(events)

    assert upstream.aborted == [request.request_id]


async def test_a_mode_that_is_not_served_is_refused():
    upstream = ScriptedUpstream(served_modes=(CacheMode.MERGED,))
    with pytest.raises(ModeUnavailable):
        await anext(upstream.stream(make_request(CacheMode.SPLIT)))
