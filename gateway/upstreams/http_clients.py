"""The connection pools: one for each proxy of the environment, and one for what has none in front of it."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from gateway.settings.schema import TimeoutSettings
from gateway.upstreams.proxies import proxy_for

_MAX_HEADER_BYTES = 32 * 1024  # of one header; and so many of them:
_MAX_HEADERS = 256


@dataclass(slots=True)
class Sent:
    """What became of sending one request."""

    reused: bool = False  # it went over a connection that an earlier one had used


class HttpClients:
    """`session` is that for a URL. Proxies are read once; credentials never come from the environment (netrc)."""

    def __init__(self, timeouts: TimeoutSettings, environment: Mapping[str, str] | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds)
        self._environment = urllib.request.getproxies() if environment is None else environment
        self._sessions: dict[URL | None, aiohttp.ClientSession] = {}
        self._of_origin: dict[URL, aiohttp.ClientSession] = {}

    def session(self, url: URL) -> aiohttp.ClientSession:
        """Raises ProxyNotSpoken."""
        origin = url.origin()
        found = self._of_origin.get(origin)
        if found is None:
            found = self._of_origin[origin] = self._session_by(proxy_for(url, self._environment))
        return found

    def _session_by(self, proxy: URL | None) -> aiohttp.ClientSession:
        if proxy not in self._sessions:
            self._sessions[proxy] = self._open(proxy)
        return self._sessions[proxy]

    def _open(self, proxy: URL | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            timeout=self._timeout,
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

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def _notes_reuse() -> aiohttp.TraceConfig:
    """Sets `Sent.reused` of a request that was sent with one as its context."""

    async def reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        sent = context.trace_request_ctx
        if isinstance(sent, Sent):
            sent.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reused)
    return config
