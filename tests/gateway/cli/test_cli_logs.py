"""What a client does wrong leaves one line in the log, without its bytes, and its leaving none."""

from __future__ import annotations

import logging

from aiohttp import ClientConnectionResetError
from aiohttp.http_exceptions import BadHttpMessage

from gateway.cli.logs import BadClientFilter, NoDescriptorsFilter


def record_of(error: Exception) -> logging.LogRecord:
    info = (type(error), error, None)
    return logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling request from %s", ("::1",), info)


def test_what_a_bad_client_sent_is_not_logged():
    record = record_of(BadHttpMessage("Invalid header value: 'Authorization: Bearer sk-secret'"))

    assert BadClientFilter().filter(record)
    text = logging.Formatter("%(levelname)s %(message)s").format(record)
    assert text == "WARNING Error handling request from ::1: it sent no valid HTTP (BadHttpMessage)"


def test_a_client_that_leaves_while_its_answer_is_written_is_no_error():
    assert not BadClientFilter().filter(record_of(ClientConnectionResetError("Cannot write to closing transport")))


def test_a_fault_of_ours_keeps_its_traceback():
    record = record_of(ValueError("ours"))

    assert BadClientFilter().filter(record)
    assert "ValueError: ours" in logging.Formatter("%(levelname)s %(message)s").format(record)


def test_refused_connections_are_said_once_in_a_while():
    now = [0.0]
    only_now_and_then = NoDescriptorsFilter(lambda: now[0])
    said = []
    for now[0] in (0.0, 0.1, 9.9, 10.0):
        message = "socket.accept() out of system resource\nsocket: ..."
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), None)
        said.append(only_now_and_then.filter(record) and record.getMessage()[:21])
    assert said == ["no file descriptor is", False, False, "no file descriptor is"]
    assert only_now_and_then.filter(logging.LogRecord("asyncio", logging.ERROR, "", 0, "else", (), None))
