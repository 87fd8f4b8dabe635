"""Why a request got no answer, in words for whoever reads the error. Says nothing of what was in the request."""

from __future__ import annotations

import socket

import aiohttp
from yarl import URL

from gateway.core.errors import GatewayError, UpstreamGone, UpstreamUnreachable
from gateway.upstreams.proxies import ProxyNotSpoken

_PROXY_VARIABLES = "the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY)"


def failure_to_send(error: Exception, name: str, url: URL) -> GatewayError:
    """The domain's error for one of the library's."""
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError | BrokenPipeError) or (
        isinstance(error, aiohttp.ClientOSError) and not isinstance(error, aiohttp.ClientConnectorError)
    ):
        return UpstreamGone(f"Upstream {name!r} closed the connection without an answer.")
    if isinstance(error, aiohttp.ClientResponseError) and not isinstance(error, aiohttp.ClientHttpProxyError):
        return UpstreamGone(f"Upstream {name!r} answered with something that is not valid HTTP.")
    message = f"Upstream {name!r} can't be reached at {url}: {_reason(error)}."
    return UpstreamUnreachable(message, for_good=_is_for_good(error))


_REASONS: dict[type[Exception], str] = {  # the first that fits
    aiohttp.ClientConnectorDNSError: "the host name is not known",
    aiohttp.ClientConnectorCertificateError: "its certificate is not valid for it, or was issued by someone unknown",
    aiohttp.ClientConnectorSSLError: "no TLS connection came about; does the server speak https?",
    aiohttp.ClientProxyConnectionError: f"the proxy of {_PROXY_VARIABLES} takes no connection",
    ValueError: "the URL, a header or the proxy setting is not valid",
}


def _reason(error: Exception) -> str:
    """In our own words: some libraries quote headers in their errors."""
    if isinstance(error, ProxyNotSpoken):
        return str(error)
    for kind, words in _REASONS.items():
        if isinstance(error, kind):
            return words
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy of {_PROXY_VARIABLES} answered {error.status}"
    said = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else None
    return said or type(error).__name__


def _is_for_good(error: Exception) -> bool:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return error.os_error.errno == socket.EAI_NONAME  # not when the name server is away
    return isinstance(error, aiohttp.ClientSSLError | ValueError)
