"""Large bodies both ways over real sockets: late readers, refusals before the end, and what is held of an answer."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from http1_pool_support import LARGE, OK, STREAM, again_and_again, ask, pool_to

from gateway.upstreams.http.http1_connection import READ_BYTES
from gateway.upstreams.http.http1_response import MAX_HELD
from support.http1_server import Peer
from support.waiting import until


async def some_turns() -> None:
    """Of the loop, in which whoever can go on does."""
    for _ in range(300):
        await asyncio.sleep(0)


async def test_a_large_request_arrives_whole_although_the_server_reads_late():
    async def play(peer: Peer) -> None:
        await some_turns()
        while (request := await peer.request()) is not None:
            digest = hashlib.sha256(request[1]).hexdigest().encode()
            await peer.say(OK + b"Content-Length: %d\r\n\r\n" % len(digest) + digest)

    async with pool_to(play) as (pool, server):
        for size in (len(LARGE), 0, 256 * 1024, 256 * 1024 + 1):
            body = LARGE[:size]
            assert await ask(pool, server, body) == (200, hashlib.sha256(body).hexdigest().encode())
        assert server.num_accepted == 1


async def test_a_refusal_while_the_request_is_sent_ends_the_sending():
    received = 0

    async def play(peer: Peer) -> None:
        nonlocal received
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 9\r\n\r\ntoo large")
        while piece := await peer.reader.read(2**20):
            received += len(piece)

    async with pool_to(play) as (pool, server):
        assert await ask(pool, server, LARGE) == (413, b"too large")
        await until(lambda: server.num_open == pool.num_connections == 0, "it is closed")
    assert received < len(LARGE)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_refusal_is_there_as_soon_as_its_head_is(reads):
    """Its body may take its time; and the server may read the rest of the request, or not."""
    received: list[int] = []

    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        if not reads:
            await some_turns()  # until the client can send no more
        await peer.say(b"HTTP/1.1 413 Too Large\r\nTransfer-Encoding: chunked\r\n\r\n")
        while reads and (piece := await peer.reader.read(2**20)):
            received.append(len(piece))
        await until(lambda: pool.num_connections == 0, "the client leaves")

    async with pool_to(play) as (pool, server):
        response = await pool.request("POST", server.url, {}, LARGE)
        assert response.status == 413
        response.close()
        await until(lambda: server.num_open == 0, "it is closed")
    assert sum(received) < len(LARGE)


async def test_a_refusal_by_one_who_reads_no_more_is_read():
    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 9\r\n\r\ntoo large")
        await until(lambda: pool.num_connections == 0, "the client leaves")

    async with pool_to(play) as (pool, server):
        assert await ask(pool, server, LARGE) == (413, b"too large")


async def test_an_answer_that_begins_early_waits_for_the_rest_of_the_request():
    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(STREAM + b"2\r\nhi\r\n")
        body = await peer.reader.readexactly(len(LARGE))
        await peer.say(b"40\r\n" + hashlib.sha256(body).hexdigest().encode() + b"\r\n0\r\n\r\n")
        await again_and_again(peer)

    async with pool_to(play) as (pool, server):
        assert await ask(pool, server, LARGE) == (200, b"hi" + hashlib.sha256(LARGE).hexdigest().encode())
        assert await ask(pool, server) == (200, b"hi")
        assert server.num_accepted == 1


async def test_a_slow_reader_holds_the_server_back():
    sent: list[int] = []

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK + b"Content-Length: %d\r\n\r\n" % len(LARGE))
        for at in range(0, len(LARGE), 2**16):
            await peer.say(LARGE[at : at + 2**16])
            sent.append(at)
        await again_and_again(peer)

    async with pool_to(play) as (pool, server):
        response = await pool.request("POST", server.url, {}, b"{}")
        await until(lambda: response.num_held > MAX_HELD, "it is full")
        await some_turns()
        assert response.num_held <= MAX_HELD + READ_BYTES
        assert len(sent) < len(LARGE) // 2**16
        digest, most = hashlib.sha256(), 0
        while piece := await response.read():
            digest.update(piece)
            most = max(most, len(piece))
        assert digest.digest() == hashlib.sha256(LARGE).digest()
        assert most <= MAX_HELD + READ_BYTES
        assert await ask(pool, server) == (200, b"hi")
        assert server.num_accepted == 1
