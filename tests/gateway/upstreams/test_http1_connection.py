"""One connection over a transport that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from typing_extensions import override

from gateway.upstreams.http.http1_connection import READ_BYTES, Http1Connection
from gateway.upstreams.http.http1_response import MAX_HELD


class ScriptedTransport(asyncio.Transport):
    """Takes everything at once, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told.append("write")

    @override
    def get_write_buffer_size(self) -> int:
        return 0

    @override
    def pause_reading(self) -> None:
        self.told.append("pause")

    @override
    def resume_reading(self) -> None:
        self.told.append("resume")

    @override
    def abort(self) -> None:
        self.told.append("abort")


def connected(on_free: Callable[[Http1Connection], None]) -> tuple[ScriptedTransport, Http1Connection]:
    transport = ScriptedTransport()
    connection = Http1Connection(memoryview(bytearray(READ_BYTES)), on_free, lambda _: None)
    connection.connection_made(transport)
    return transport, connection


def receive(connection: Http1Connection, data: bytes) -> None:
    for at in range(0, len(data), READ_BYTES):
        piece = data[at : at + READ_BYTES]
        connection.get_buffer(-1)[: len(piece)] = piece
        connection.buffer_updated(len(piece))


async def test_an_answer_that_is_completed_after_reading_was_paused_leaves_a_connection_that_reads():
    """A transport may hand out what it has already read, paused or not."""
    free: list[Http1Connection] = []
    transport, connection = connected(free.append)
    sending = asyncio.ensure_future(connection.send(b"POST / HTTP/1.1\r\n\r\n", b""))
    await asyncio.sleep(0)
    receive(connection, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (3 * MAX_HELD))
    response = await sending
    for _ in range(3):
        assert not free
        receive(connection, b"x" * MAX_HELD)

    assert free == [connection]
    assert transport.told == ["write", "pause", "resume"]
    assert len(await response.read()) == 3 * MAX_HELD
    assert transport.told == ["write", "pause", "resume"]


async def test_a_connection_that_is_closed_sends_nothing():
    transport, connection = connected(lambda _: None)
    connection.connection_lost(None)
    sending = asyncio.ensure_future(connection.send(b"POST / HTTP/1.1\r\n\r\n", b""))
    await asyncio.wait([sending])
    assert sending.exception() is not None
    assert transport.told == []
