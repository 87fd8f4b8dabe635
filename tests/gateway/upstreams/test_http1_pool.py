"""Requests over real sockets: which connections are used again and which are not, and how broken ones are told."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from http1_pool_support import HI, OK, STREAM, again_and_again, ask, pool_to, says
from yarl import URL

from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut, InvalidHttp
from gateway.upstreams.http.http1_pool import Http1Pool
from support.http1_server import DEADLINE_SECONDS, Peer, Play, Server, serving
from support.waiting import until

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
