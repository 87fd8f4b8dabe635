"""Requests over real sockets: what is used again and what is not, who is cut off, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from yarl import URL

from gateway.upstreams.http.http1_connection import READ_BYTES
from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut, ConnectTimedOut, InvalidHttp
from gateway.upstreams.http.http1_pool import Http1Pool
from gateway.upstreams.http.http1_response import MAX_HELD, Http1Response
from support.http1_server import DEADLINE_SECONDS, Peer, Play, Server, serving, until

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


# --------------------------------------------------------------------------------------------- using it once again


async def test_one_connection_serves_one_request_after_the_other():
    async with pool_to(again_and_again) as (pool, server):
        for _ in range(5):
            assert await ask(pool, server) == (200, b"hi")
        assert (server.num_accepted, pool.num_connections) == (1, 1)


async def test_requests_at_once_have_a_connection_each_and_leave_them_to_the_next():
    async with pool_to(again_and_again) as (pool, server):
        for _ in range(2):
            await asyncio.gather(*(ask(pool, server) for _ in range(20)))
        assert server.num_accepted == 20


async def test_any_answers_in_any_pieces_come_over_one_connection():
    chance = random.Random(7)
    sent: list[bytes] = []

    async def play(peer: Peer) -> None:
        while await peer.request() is not None:
            body = chance.randbytes(chance.randrange(0, 3000))
            sent.append(body)
            interim = b"HTTP/1.1 100 Continue\r\n\r\n" if chance.random() < 0.3 else b""
            if chance.random() < 0.5:
                wire = OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
            else:
                pieces = [body[at : at + 200] for at in range(0, len(body), 200)]
                wire = STREAM + b"".join(b"%x;e=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
                wire += b"0\r\nX-Trailer: x\r\n\r\n"
            for at in range(0, len(interim + wire), 700):
                await peer.say((interim + wire)[at : at + 700])
                await asyncio.sleep(0)

    async with pool_to(play) as (pool, server):
        got = [(await ask(pool, server))[1] for _ in range(60)]
        assert (got == sent, server.num_accepted) == (True, 1)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        OK + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        HI + HI,
        HI + b"HTTP/1.1 2",
        HI + b"x",
    ],
)
async def test_a_connection_that_is_not_good_for_more_is_closed_after_its_answer(answer):
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer)
        await peer.end()

    async with pool_to(play) as (pool, server):
        assert [await ask(pool, server) for _ in range(3)] == [(200, b"hi")] * 3
        assert server.num_accepted == 3


async def test_an_answer_may_end_with_its_connection():
    async with pool_to(says(OK + b"\r\nall of it")) as (pool, server):
        assert await ask(pool, server) == (200, b"all of it")


async def test_a_connection_that_the_server_closed_meanwhile_is_not_used():
    async with pool_to(says(HI)) as (pool, server):
        await ask(pool, server)
        await until(lambda: pool.num_connections == 0, "its end is seen")
        assert await ask(pool, server) == (200, b"hi")
        assert server.num_accepted == 2


async def test_of_several_kept_connections_one_that_is_open_is_used():
    first, second = asyncio.Event(), asyncio.Event()

    async def play(peer: Peer) -> None:
        number = server.num_accepted
        await peer.request()
        await (first if number == 1 else second).wait()
        await peer.say(HI)
        if number == 1:
            await again_and_again(peer)

    async with pool_to(play) as (pool, server):
        asking = [asyncio.ensure_future(ask(pool, server)) for _ in range(2)]
        await until(lambda: server.num_open == 2, "both have asked")
        first.set()
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        second.set()
        await asyncio.wait(asking)
        await until(lambda: pool.num_connections == 1, "the second is closed")
        assert await ask(pool, server) == (200, b"hi")
        assert server.num_accepted == 2


async def test_bytes_that_nobody_asked_for_close_a_waiting_connection():
    speak = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(HI)
        await speak.wait()
        await peer.say(OK + b"Content-Length: 4\r\n\r\nevil")
        await peer.end()

    async with pool_to(play) as (pool, server):
        await ask(pool, server)
        speak.set()
        await until(lambda: pool.num_connections == 0, "it is closed")
        assert await ask(pool, server) == (200, b"hi")


async def test_a_waiting_connection_is_closed_in_the_end():
    async with pool_to(again_and_again, idle_seconds=0.01) as (pool, server):
        await asyncio.gather(ask(pool, server), ask(pool, server))
        await until(lambda: server.num_open == 0, "both are closed")
        assert await ask(pool, server) == (200, b"hi")
        await until(lambda: server.num_open == 0, "and so is the third")


# ------------------------------------------------------------------------------------------------------ broken ones


@asynccontextmanager
async def pool_that_kept(then: Play, **how: float) -> AsyncIterator[tuple[Http1Pool, Server, list[int]]]:
    """A pool with one kept connection. `then` meets each later request; the list says on which connection it came."""
    came: list[int] = []

    async def play(peer: Peer) -> None:
        number = server.num_accepted
        while await peer.request() is not None:
            came.append(number)
            if came == [1]:
                await peer.say(HI)
                continue
            await then(peer)
            return

    async with pool_to(play, **how) as (pool, server):
        await ask(pool, server)
        yield pool, server, came


async def nothing(_peer: Peer) -> None:
    pass


async def half_a_head(peer: Peer) -> None:
    await peer.say(OK + b"Content-Le")


async def test_a_request_over_a_connection_that_was_just_closing_goes_out_once_more_and_no_oftener():
    async with pool_that_kept(nothing) as (pool, server, came):
        with pytest.raises(ConnectionCut) as cut:
            await ask(pool, server)
        assert (came, cut.value.had_begun) == ([1, 1, 2], False)


async def test_a_request_that_a_kept_connection_s_server_was_at_work_on_is_not_sent_again():
    async with pool_that_kept(nothing, closing_seconds=0.0) as (pool, server, came):
        with pytest.raises(ConnectionCut) as cut:
            await ask(pool, server)
        assert (came, cut.value.had_begun) == ([1, 1], False)


async def test_a_request_whose_answer_has_begun_is_never_sent_again():
    async with pool_that_kept(half_a_head) as (pool, server, came):
        with pytest.raises(ConnectionCut) as cut:
            await ask(pool, server)
        assert (came, cut.value.had_begun) == ([1, 1], True)


async def test_a_request_over_a_new_connection_is_never_sent_again():
    async with pool_to(nothing) as (pool, server):
        with pytest.raises(ConnectionCut):
            await ask(pool, server)
        assert server.num_accepted == 1


async def test_what_came_before_a_cut_is_handed_out_before_the_error():
    async with pool_to(says(STREAM + b"2\r\nhi\r\n")) as (pool, server):
        response = await pool.request("POST", server.url, {}, b"{}")
        found = await response.read()
        with pytest.raises(ConnectionCut):
            await response.read()
        assert found == b"hi"


async def test_something_else_than_http_is_told_and_hung_up_on():
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"SSH-2.0-OpenSSH\r\n")
        await peer.end()

    async with pool_to(play) as (pool, server):
        with pytest.raises(InvalidHttp):
            await ask(pool, server)
        await until(lambda: server.num_open == 0, "it is closed")


async def test_where_nobody_listens_the_system_s_word_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pool = Http1Pool(DEADLINE_SECONDS)
        with pytest.raises(ConnectFailed) as failed:
            await pool.request("POST", URL(f"http://127.0.0.1:{taken.getsockname()[1]}/"), {}, b"")
        assert isinstance(failed.value.cause, ConnectionRefusedError)
        await pool.close()


async def test_a_header_that_cannot_be_sent_opens_no_connection():
    async with pool_to(again_and_again) as (pool, server):
        with pytest.raises(ValueError, match="line break"):
            await pool.request("POST", server.url, {"A": "b\r\nC: d"}, b"")
        assert server.num_accepted == 0


# ----------------------------------------------------------------------------------------------------- giving it up


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


# ------------------------------------------------------------------------------------------------------- large ones


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


# --------------------------------------------------------------------------------------------------------- addresses


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
async def test_an_ipv6_address_is_reached_and_named_with_brackets():
    heads: list[bytes] = []

    async def play(peer: Peer) -> None:
        while (request := await peer.request()) is not None:
            heads.append(request[0])
            await peer.say(HI)

    async with serving(play, host="::1") as server:
        pool = Http1Pool(DEADLINE_SECONDS)
        assert await ask(pool, server) == (200, b"hi")
        await pool.close()
    assert f"Host: [::1]:{server.port}\r\n".encode() in heads[0]


async def test_a_name_with_several_addresses_finds_the_one_that_listens():
    async with pool_to(again_and_again) as (pool, server):
        server.host = "localhost"
        assert await ask(pool, server) == (200, b"hi")


def test_a_pool_can_be_made_without_a_loop():
    assert Http1Pool(1.0).num_connections == 0
