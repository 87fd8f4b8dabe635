"""A pool of connections to a server that plays a script, and what most of these servers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.upstreams.http.http1_pool import Http1Pool
from gateway.upstreams.http.http1_response import Http1Response
from support.http1_server import DEADLINE_SECONDS, Peer, Play, Server, serving
from support.waiting import until

OK = b"HTTP/1.1 200 OK\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"
STREAM = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = bytes(range(256)) * (30 * 4096)  # 30 MiB


async def again_and_again(peer: Peer) -> None:
    while await peer.request() is not None:
        await peer.say(HI)


def says(*answers: bytes) -> Play:
    """One answer to each request, then the end."""

    async def play(peer: Peer) -> None:
        for answer in answers:
            if await peer.request() is None:
                return
            await peer.say(answer)

    return play


@asynccontextmanager
async def pool_to(play: Play, **how: float) -> AsyncIterator[tuple[Http1Pool, Server]]:
    """At the end no connection and no task of the pool is left."""
    tasks = asyncio.all_tasks()
    async with serving(play) as server:
        pool = Http1Pool(DEADLINE_SECONDS, **how)
        try:
            yield pool, server
        finally:
            await pool.close()
    await until(lambda: asyncio.all_tasks() <= tasks, "every task ends")
    assert pool.num_connections == 0


async def ask(pool: Http1Pool, server: Server, body: bytes = b"{}") -> tuple[int, bytes]:
    response = await pool.request("POST", server.url, {"A": "b"}, body)
    return response.status, await rest(response)


async def rest(response: Http1Response) -> bytes:
    found = bytearray()
    while piece := await response.read():
        found += piece
    return bytes(found)
