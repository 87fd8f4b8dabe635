"""What can go wrong with a request over HTTP/1.1, as the one who sends it sees it."""

from __future__ import annotations


class Http1Error(Exception):
    """Any of them."""


class ConnectFailed(Http1Error):
    """No connection came about. `cause` is what the operating system, the name service or TLS said."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ConnectTimedOut(Http1Error):
    """No connection came about in time."""


class ConnectionCut(Http1Error):
    """The connection ended before the answer did. `had_begun`: some of the answer had come."""

    def __init__(self, *, had_begun: bool) -> None:
        super().__init__("the connection ended before the answer did")
        self.had_begun = had_begun


class InvalidHttp(Http1Error):
    """What came is not a valid answer, or its head is larger than any real one."""
