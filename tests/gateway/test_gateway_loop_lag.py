"""How late the event loop is: what blocks it is seen, and nothing goes on after the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.loop_lag import LoopLag
from gateway.metrics import Metrics

DEADLINE_SECONDS = 10


def block(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.fixture
def lags():
    return asyncio.Queue()


async def test_what_blocks_the_loop_shows_as_lateness(lags):
    lag = LoopLag(lags.put_nowait, interval_seconds=0.01)
    lag.start()
    block(0.2)
    first = await asyncio.wait_for(lags.get(), DEADLINE_SECONDS)
    lag.stop()

    assert first >= 0.19


async def test_it_measures_again_and_again_until_it_is_stopped(lags):
    lag = LoopLag(lags.put_nowait, interval_seconds=0.001)
    lag.start()
    seen = [await asyncio.wait_for(lags.get(), DEADLINE_SECONDS) for _ in range(3)]
    lag.stop()
    block(0.005)
    for _ in range(5):
        await asyncio.sleep(0)

    assert min(seen) >= 0
    assert lags.empty()


def test_it_is_a_metric_without_labels():
    metrics = Metrics()
    metrics.loop_lag.observe(0.015)

    assert b'kvgate_event_loop_lag_seconds_bucket{le="0.02"} 1.0' in metrics.render()
