"""The words for a request that got no answer, and whether it is worth asking again."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest
from yarl import URL

from gateway.core.errors import UpstreamGone, UpstreamUnreachable
from gateway.upstreams.http.failures import failure_to_send
from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut, InvalidHttp

PLACE = URL("http://h.example/v1/chat/completions")
SEVERAL = "Multiple exceptions: [Errno 111] Connect call failed ('::1', 1), [Errno 111] Connect call failed ('1.1', 1)"


@pytest.mark.parametrize(
    ("cause", "words", "is_for_good"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the host name is not known", True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "the host name is not known", False),
        (ssl.SSLCertVerificationError(1, "self-signed"), "its certificate is not valid for it", True),
        (ssl.SSLError(1, "wrong version number"), "does the server speak https?", True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), ": Connect call failed.", False),
        (TimeoutError(errno.ETIMEDOUT, "Connect call failed"), ": Connect call failed.", False),
        (OSError(SEVERAL), SEVERAL, False),
        (ConnectionResetError(), ": ConnectionResetError.", False),
    ],
)
def test_why_no_connection_came_about(cause, words, is_for_good):
    failure = failure_to_send(ConnectFailed(cause), "t", PLACE)
    assert isinstance(failure, UpstreamUnreachable)
    assert words in failure.message
    assert str(PLACE) in failure.message
    assert failure.for_good is is_for_good


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionCut(had_begun=False), "closed the connection without an answer"),
        (ConnectionCut(had_begun=True), "closed the connection without an answer"),
        (InvalidHttp("x"), "is not valid HTTP"),
    ],
)
def test_why_no_answer_came_over_a_connection(error, words):
    failure = failure_to_send(error, "t", PLACE)
    assert isinstance(failure, UpstreamGone)
    assert words in failure.message
    assert "x" not in failure.message.replace("Upstream", "")


def test_a_header_that_cannot_be_sent_is_not_quoted():
    failure = failure_to_send(ValueError("sk-secret"), "t", PLACE)
    assert isinstance(failure, UpstreamUnreachable)
    assert "sk-secret" not in failure.message
