"""Requests to a server behind a proxy of the environment, through aiohttp's client."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from gateway.settings.schema import TimeoutSettings
from gateway.upstreams.http.http1_errors import ConnectionCut, ConnectTimedOut

_MAX_HEADER_BYTES = 32 * 1024  # of one header; and so many of them:
_MAX_HEADERS = 256
_LARGE_BODY = 512 * 1024


@dataclass(slots=True)
class _Sent:
    """What became of sending one request."""

    reused: bool = False  # it went over a connection that an earlier one had used


class ProxiedAnswer:
    """An answer of aiohttp's client in the form of our own."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = list(response.headers.items())
        self._response = response

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, HttpProcessingError, OSError):
            raise ConnectionCut(had_begun=True) from None

    def close(self) -> None:
        if not self._response.closed:
            self._response.close()


async def request_by_session(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    on_resent: Callable[[], object] | None = None,
) -> ProxiedAnswer:
    """Once more, if it went over a pooled connection that the server was closing: most likely it hasn't seen it."""
    sent = _Sent()
    try:
        return await _request(session, method, url, headers, body, sent=sent)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        if not sent.reused:
            raise
    if on_resent is not None:
        on_resent()
    return await _request(session, method, url, headers, body, sent=_Sent())


async def _request(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    sent: _Sent,
) -> ProxiedAnswer:
    data = io.BytesIO(body) if body and len(body) >= _LARGE_BODY else body  # a file is sent piece by piece
    try:
        response = await session.request(
            method, url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=sent
        )
    except aiohttp.ConnectionTimeoutError:
        raise ConnectTimedOut("no connection in time") from None
    return ProxiedAnswer(response)


def open_session(timeouts: TimeoutSettings, proxy: URL | None) -> aiohttp.ClientSession:
    """Credentials never come from the environment (netrc)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        proxy=proxy,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        max_headers=_MAX_HEADERS,
        trace_configs=[_notes_reuse()],
    )


def _notes_reuse() -> aiohttp.TraceConfig:
    """Sets `_Sent.reused` of a request that was sent with one as its context."""

    async def reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        sent = context.trace_request_ctx
        if isinstance(sent, _Sent):
            sent.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config
