"""How a server is reached: directly, by our own client, or through a proxy of the environment, by aiohttp's."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Callable, Mapping

import aiohttp
from yarl import URL

from gateway.settings.schema import TimeoutSettings
from gateway.upstreams.http.answer import HttpAnswer
from gateway.upstreams.http.http1_pool import Http1Pool
from gateway.upstreams.http.proxied import open_session, request_by_session
from gateway.upstreams.http.proxies import proxy_for


class HttpClients:
    """The connections to all servers. Proxies are read once. `tls` is for https, where not the system's authorities."""

    def __init__(
        self,
        timeouts: TimeoutSettings,
        environment: Mapping[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeouts = timeouts
        self._environment = urllib.request.getproxies() if environment is None else environment
        self._direct = Http1Pool(timeouts.connect_seconds, tls=tls)
        self._proxies: dict[URL, URL | None] = {}  # by origin
        self._sessions: dict[URL | None, aiohttp.ClientSession] = {}  # by proxy

    async def request(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        on_resent: Callable[[], object] | None = None,
    ) -> HttpAnswer:
        """The answer, once its headers have come; whoever gets it closes it. `on_resent`: it goes out once more.

        Raises ProxyNotSpoken, an Http1Error, an error of aiohttp's client, or ValueError for what can't be sent.
        """
        if self._proxy(url) is None:
            return await self._direct.request(method, url, headers, body, on_resent=on_resent)
        return await request_by_session(self.session(url), method, url, headers, body, on_resent=on_resent)

    def session(self, url: URL) -> aiohttp.ClientSession:
        """aiohttp's client for a URL, with a proxy or without. Raises ProxyNotSpoken."""
        proxy = self._proxy(url)
        if proxy not in self._sessions:
            self._sessions[proxy] = open_session(self._timeouts, proxy)
        return self._sessions[proxy]

    def _proxy(self, url: URL) -> URL | None:
        origin = url.origin()
        if origin not in self._proxies:
            self._proxies[origin] = proxy_for(url, self._environment)
        return self._proxies[origin]

    async def close(self) -> None:
        await self._direct.close()
        for session in self._sessions.values():
            await session.close()
