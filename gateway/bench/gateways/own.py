"""What this project's gateway says of itself, next to what was measured: lag of its event loop, counts, records.

The figures are to be those of a gateway that counts and records every request; this checks that it did.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import pairwise

import aiohttp

from gateway.bench.failures import reason_of
from gateway.bench.process import BenchError

LAG_SERIES = "kvgate_event_loop_lag_seconds"
REQUESTS_SERIES = "kvgate_requests_total"
TIMEOUT = aiohttp.ClientTimeout(total=10)
TRIES, PAUSE_SECONDS = 40, 0.05  # counted and recorded just after the stream has ended

Buckets = Mapping[float, float]  # upper bound -> how many were not above it


class OwnGateway:
    """Asks for /metrics and records with the key of the measured requests."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._url = url
        self._headers = headers

    async def metrics(self) -> str:
        status, body = await self._get("/metrics")
        if status != 200:
            raise BenchError(f"/metrics answered HTTP {status}")
        return body

    async def require_record(self, request_id: str) -> None:
        status = 0
        for _ in range(TRIES):
            status, _body = await self._get(f"/v1/requests/{request_id}")
            if status == 200:
                return
            await asyncio.sleep(PAUSE_SECONDS)
        raise BenchError(f"request {request_id!r} has no record (HTTP {status}): figures would leave that work out")

    async def require_counted(self, num_requests: int) -> None:
        counted = 0.0
        for _ in range(TRIES):
            counted = total_of(await self.metrics(), REQUESTS_SERIES)
            if counted >= num_requests:
                return
            await asyncio.sleep(PAUSE_SECONDS)
        raise BenchError(f"{num_requests} requests were answered, but its metrics count {counted:g}")

    async def _get(self, path: str) -> tuple[int, str]:
        try:
            async with self._session.get(self._url + path, headers=self._headers, timeout=TIMEOUT) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self._url}{path}: {reason_of(error)}") from None


def total_of(metrics: str, series: str) -> float:
    """Over all labels."""
    pattern = rf"^{re.escape(series)}(?:\{{.*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics, flags=re.MULTILINE))


def buckets_of(metrics: str, series: str) -> dict[float, float]:
    """A histogram's, over all other labels. Empty: there is none."""
    found: dict[float, float] = {}
    pattern = rf'^{re.escape(series)}_bucket\{{(?:.*,)?le="([^"]+)"(?:,.*)?\}} (\S+)$'
    for bound, count in re.findall(pattern, metrics, flags=re.MULTILINE):
        found[float(bound)] = found.get(float(bound), 0.0) + float(count)
    return found


def quantile_between(before: Buckets, after: Buckets, share: float) -> float | None:
    """Of what came between the two readings, interpolated within its bucket; the last finite bound if it is above."""
    counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(after.items())]
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share / 100 * counts[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *counts]):
        if upto >= wanted and upto > below:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / (upto - below)
    return None
