"""Why a server gave no answer, in words of our own: an HTTP client's errors speak of its own insides."""

from __future__ import annotations

import os

import aiohttp

_CUT = "the connection ended before the answer did"
_REASONS: dict[type[Exception], str] = {  # the first that fits
    TimeoutError: "no answer in time",
    aiohttp.ClientConnectorDNSError: "the host name is not known",
    aiohttp.ClientSSLError: "no TLS connection came about; does the server speak https?",
    aiohttp.ServerDisconnectedError: _CUT,
    aiohttp.ClientPayloadError: _CUT,
    aiohttp.ClientResponseError: "what answers there does not speak HTTP as expected",
}


def reason_of(error: Exception) -> str:
    """For the end of a sentence that names the URL."""
    words = next((words for kind, words in _REASONS.items() if isinstance(error, kind)), None)
    if words is not None:
        return words
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number).lower() if number else "no connection came about"
    return _CUT if isinstance(error, aiohttp.ClientOSError) else type(error).__name__
