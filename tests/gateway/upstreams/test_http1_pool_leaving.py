"""Who gives up, at any moment, leaves no connection and no socket; closing the pool cuts what is under way."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from http1_pool_support import LARGE, OK, STREAM, ask, pool_to
from yarl import URL

from gateway.upstreams.http.http1_errors import ConnectionCut, ConnectTimedOut
from gateway.upstreams.http.http1_pool import Http1Pool
from support.http1_server import DEADLINE_SECONDS, Peer
from support.waiting import until


def num_sockets() -> int:
    return sum(os.readlink(link).startswith("socket:") for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


@pytest.fixture
def deaf_port():
    """Of a listener whose queue is full: the kernel drops what comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for filler in fillers:
            filler.close()


async def test_giving_up_while_connecting_leaves_no_socket(deaf_port):
    tasks, before = asyncio.all_tasks(), num_sockets()
    pool = Http1Pool(DEADLINE_SECONDS)
    asking = asyncio.ensure_future(pool.request("POST", URL(f"http://127.0.0.1:{deaf_port}/"), {}, b""))
    await until(lambda: num_sockets() == before + 1, "it connects")
    asking.cancel()
    await until(lambda: num_sockets() == before and asyncio.all_tasks() <= tasks, "nothing is left")
    assert asking.cancelled()
    await pool.close()


@pytest.mark.parametrize("num_turns", range(10))
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_giving_up_at_any_moment_of_connecting_leaves_no_socket(host, num_turns):
    async with pool_to(streams) as (pool, server):
        before = num_sockets()
        asking = asyncio.ensure_future(pool.request("POST", server.url.with_host(host), {}, b"{}"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: num_sockets() == before and server.num_open == 0, "nothing is left")


async def test_a_connection_that_takes_too_long_leaves_no_socket(deaf_port):
    before = num_sockets()
    pool = Http1Pool(0.02)
    with pytest.raises(ConnectTimedOut):
        await pool.request("POST", URL(f"http://127.0.0.1:{deaf_port}/"), {}, b"")
    await until(lambda: num_sockets() == before, "nothing is left")
    await pool.close()


@pytest.mark.parametrize("where", ["sending", "before the head", "within the head"])
async def test_giving_up_before_the_answer_closes_the_connection_at_once(where):
    reached = asyncio.Event()

    async def play(peer: Peer) -> None:
        if where == "sending":
            await peer.reader.readexactly(300_000)
            reached.set()
            await until(lambda: pool.num_connections == 0, "the client leaves without being read")
            return
        await peer.request()
        await peer.say(OK if where == "within the head" else b"")
        reached.set()
        await peer.end()

    async with pool_to(play) as (pool, server):
        asking = asyncio.ensure_future(ask(pool, server, LARGE if where == "sending" else b"{}"))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await reached.wait()
        asking.cancel()
        await until(lambda: server.num_open == pool.num_connections == 0, "it is closed")
        assert asking.cancelled()


async def streams(peer: Peer) -> None:
    await peer.request()
    await peer.say(STREAM)
    await peer.end()


async def test_closing_an_answer_before_its_end_closes_the_connection_at_once():
    async with pool_to(streams) as (pool, server):
        response = await pool.request("POST", server.url, {}, b"{}")
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        reading.cancel()
        response.close()
        await until(lambda: server.num_open == pool.num_connections == 0, "it is closed")
        assert reading.cancelled()


async def test_closing_the_pool_cuts_what_is_under_way():
    async with pool_to(streams) as (pool, server):
        response = await pool.request("POST", server.url, {}, b"{}")
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        await pool.close()
        assert pool.num_connections == 0
        with pytest.raises(ConnectionCut):
            await reading


async def test_closing_the_pool_is_no_good_end_of_an_answer_that_ends_with_its_connection():
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"\r\nhal")
        await peer.end()

    async with pool_to(play) as (pool, server):
        response = await pool.request("POST", server.url, {}, b"{}")
        assert await response.read() == b"hal"
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(ConnectionCut):
            await reading
