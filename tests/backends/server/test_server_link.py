"""One end of a connection: whole messages, cut connections, a reader that never reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from backends.protocol import link as link_module
from backends.protocol.framing import Encoder
from backends.protocol.link import FrameLink, open_link
from backends.protocol.messages import Abort, Drain, FromEngine, ToEngine

DEADLINE_SECONDS = 10


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


class Heard:
    """What a link has said."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[ToEngine] = asyncio.Queue()
        self.reasons: list[str] = []

    async def open(self, sock: socket.socket) -> FrameLink[ToEngine]:
        return await open_link(sock, ToEngine, received=self.messages.put_nowait, lost=self.reasons.append)


async def closed(link: FrameLink[ToEngine]) -> None:
    await asyncio.wait_for(link.closed(), DEADLINE_SECONDS)


async def test_messages_arrive_whole_and_in_order_however_they_are_cut(pair: tuple[socket.socket, socket.socket]):
    heard = Heard()
    link = await heard.open(pair[0])
    frames = Encoder().encode(Abort(request_id="a")) + Encoder().encode(Drain())
    for byte in frames:
        pair[1].send(bytes([byte]))
        await asyncio.sleep(0)

    assert await asyncio.wait_for(heard.messages.get(), DEADLINE_SECONDS) == Abort(request_id="a")
    assert await asyncio.wait_for(heard.messages.get(), DEADLINE_SECONDS) == Drain()
    link.close()
    await closed(link)


async def test_the_end_of_the_other_side_is_told_once(pair: tuple[socket.socket, socket.socket]):
    heard = Heard()
    link = await heard.open(pair[0])
    pair[1].close()
    await closed(link)

    assert heard.reasons == ["its connection ended"]
    assert not link.is_open
    link.send(Drain())  # after the end: nothing happens


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", Encoder().encode(Drain())])
async def test_what_is_no_message_of_ours_cuts_the_link(pair: tuple[socket.socket, socket.socket], data: bytes):
    reasons: list[str] = []
    received: list[FromEngine] = []
    link: FrameLink[FromEngine] = await open_link(pair[0], FromEngine, received=received.append, lost=reasons.append)
    pair[1].send(data)
    await asyncio.wait_for(link.closed(), DEADLINE_SECONDS)

    assert received == []
    assert "not a message of ours" in reasons[0]


async def test_a_side_that_never_reads_is_cut_and_does_not_hold_up_the_writer(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(link_module, "MAX_UNREAD_BYTES", 1_000_000)
    heard = Heard()
    link = await heard.open(pair[0])
    for _ in range(3):
        link.write(bytes(1_000_000))
    await closed(link)

    assert heard.reasons == ["it does not read what is sent to it"]
