"""Whether a server answers yet. One question over HTTP; knows no server by name."""

from __future__ import annotations

import aiohttp

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=PROBE_TIMEOUT) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
