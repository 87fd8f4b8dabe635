"""How late the event loop is: what blocks it is seen, and nothing goes on after the end."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.loop_lag import LoopLag, latenesses
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


async def test_timers_that_never_ran_in_a_halt_count_as_well(lags):
    lag = LoopLag(lags.put_nowait, interval_seconds=0.05)
    lag.start()
    block(0.3)
    seen = [await asyncio.wait_for(lags.get(), DEADLINE_SECONDS) for _ in range(5)]
    lag.stop()

    assert seen[0] >= 0.25
    assert [round(early - late, 6) for early, late in pairwise(seen)] == [0.05] * 4


@given(late=st.floats(0, 3600), interval=st.floats(0.001, 1))
def test_a_halt_counts_as_often_as_timers_were_due_and_never_without_end(late, interval):
    found = latenesses(late, interval)

    assert found[0] == late
    assert min(found) >= -1e-6
    assert len(found) == min(int(late / interval), 500) + 1


def test_it_is_a_metric_without_labels():
    metrics = Metrics()
    metrics.loop_lag.observe(0.015)

    assert b'kvgate_event_loop_lag_seconds_bucket{le="0.02"} 1.0' in metrics.render()
