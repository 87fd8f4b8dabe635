"""Why a request got no answer, in words for whoever reads the error. Says nothing of what was in the request."""

from __future__ import annotations

import socket
import ssl

import aiohttp
from yarl import URL

from gateway.core.errors import GatewayError, UpstreamGone, UpstreamUnreachable
from gateway.upstreams.http.http1_errors import ConnectFailed, ConnectionCut, InvalidHttp
from gateway.upstreams.http.proxies import ProxyNotSpoken

_PROXY_VARIABLES = "the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY)"


def failure_to_send(error: Exception, name: str, url: URL) -> GatewayError:
    """The domain's error for one of the clients'."""
    if isinstance(error, ConnectionCut | aiohttp.ServerDisconnectedError | ConnectionResetError | BrokenPipeError) or (
        isinstance(error, aiohttp.ClientOSError) and not isinstance(error, aiohttp.ClientConnectorError)
    ):
        return UpstreamGone(f"Upstream {name!r} closed the connection without an answer.")
    if isinstance(error, InvalidHttp | aiohttp.ClientResponseError) and not isinstance(
        error, aiohttp.ClientHttpProxyError
    ):
        return UpstreamGone(f"Upstream {name!r} answered with something that is not valid HTTP.")
    message = f"Upstream {name!r} can't be reached at {url}: {_reason(error)}."
    return UpstreamUnreachable(message, for_good=_is_for_good(error))


_REASONS: dict[type[Exception], str] = {  # the first that fits
    socket.gaierror: "the host name is not known",
    ssl.SSLCertVerificationError: "its certificate is not valid for it, or was issued by someone unknown",
    ssl.SSLError: "no TLS connection came about; does the server speak https?",
    aiohttp.ClientProxyConnectionError: f"the proxy of {_PROXY_VARIABLES} takes no connection",
    ValueError: "the URL, a header or the proxy setting is not valid",
}


def _reason(error: Exception) -> str:
    """In our own words: some libraries quote headers in their errors."""
    if isinstance(error, ProxyNotSpoken):
        return str(error)
    cause = _cause(error)
    for kind, words in _REASONS.items():
        if isinstance(cause, kind):
            return words
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy of {_PROXY_VARIABLES} answered {error.status}"
    if isinstance(error, ConnectFailed | aiohttp.ClientConnectorError) and isinstance(cause, OSError):
        return cause.strerror or str(cause) or type(cause).__name__  # of several addresses, all is in its text
    return type(error).__name__


def _is_for_good(error: Exception) -> bool:
    cause = _cause(error)
    if isinstance(cause, socket.gaierror):
        return cause.errno == socket.EAI_NONAME  # not when the name server is away
    return isinstance(cause, ssl.SSLError | ValueError)


def _cause(error: Exception) -> Exception:
    """What the operating system, the name service or TLS said of a connection that didn't come about."""
    if isinstance(error, ConnectFailed):
        return error.cause
    if isinstance(error, aiohttp.ClientProxyConnectionError):
        return error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    return error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
