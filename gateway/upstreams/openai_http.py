"""An OpenAI-compatible server over HTTP: the client's bytes go there, the answer's bytes come back.

Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from gateway.core.errors import (
    GatewayError,
    LoopDetected,
    UpstreamGone,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.types import ModelCard
from gateway.settings.base_url import join_url, normalise_base_url
from gateway.settings.schema import TargetSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.content_coding import ContentDecoder
from gateway.upstreams.http_headers import HOP_HEADER, MAX_HOPS, client_credentials, hops, to_client, to_upstream
from gateway.upstreams.key_blotter import KeyBlotter

_LARGE_BODY = 512 * 1024
_OURS = ("X-Cache-Mode", "X-Request-Id")  # the service fills them in
_MODELS_SECONDS = 2.5  # clients give a model list three seconds
_MODELS_FRESH_SECONDS = 60.0
_MODELS_RETRY_SECONDS = 5.0


class HttpClients:
    """The connection pools: one for this host, which no proxy stands in front of, and one for everything else."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_seconds)
        self._loopback: aiohttp.ClientSession | None = None
        self._remote: aiohttp.ClientSession | None = None

    def session(self, url: URL) -> aiohttp.ClientSession:
        if is_loopback(url.host or ""):
            self._loopback = self._loopback or self._open(trust_env=False)
            return self._loopback
        self._remote = self._remote or self._open(trust_env=True)
        return self._remote

    def _open(self, *, trust_env: bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=trust_env,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        for session in (self._loopback, self._remote):
            if session is not None:
                await session.close()


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class HttpResponse:
    """An answer whose headers have arrived. Its body is decoded where we know how."""

    def __init__(self, response: aiohttp.ClientResponse, idle_seconds: float, *, key: str = "") -> None:
        self.status = response.status
        headers = to_client(response.headers.items())
        self._decoder = ContentDecoder(headers.get("Content-Encoding", ""))
        if self._decoder.supported:
            headers.pop("Content-Encoding", None)
        self.headers: Mapping[str, str] = CIMultiDict(headers)
        self._response = response
        self._idle_seconds = idle_seconds
        self._blotter = KeyBlotter(key)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            chunk = await self._read()
            decoded = self._blotter.feed(self._decoder.decode(chunk)) if chunk else self._blotter.rest()
            if decoded:
                yield decoded
            if not chunk:
                return

    async def _read(self) -> bytes:
        """The next bytes; empty at the end of the body."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await self._response.content.readany()
        except TimeoutError:
            message = f"The upstream was silent for {self._idle_seconds:g} s within its answer."
            raise UpstreamTimeout(message) from None
        except (aiohttp.ClientError, ConnectionError, OSError):
            raise UpstreamGone(
                "The upstream broke the connection before the answer was complete. "
                "What came so far is not the whole answer."
            ) from None

    async def close(self) -> None:
        if not self._response.closed:
            self._response.close()


class OpenAIHttpUpstream:
    """One target. Its key goes there and nowhere else."""

    def __init__(self, target: TargetSettings, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str) -> None:
        self.name = target.name
        self._base, self.notices = normalise_base_url(target.base_url)
        self._key = target.api_key.get_secret_value().strip() if target.api_key else ""
        self._forward_client_key = target.forward_client_key and not self._key
        self._listed = target.models
        self._clients = clients
        self._timeouts = timeouts
        self._hop_id = hop_id
        self._cards: Sequence[ModelCard] = ()
        self._cards_until = 0.0
        self.reachable: bool | None = None  # by the last request; None = none yet

    async def open(self, request: RawRequest) -> HttpResponse:
        """Send the request and wait for the headers of the answer."""
        url = URL(join_url(self._base, request.path))
        headers = self._headers(request)
        try:
            try:
                response = await self._send(url, request.body, headers)
            except aiohttp.ServerDisconnectedError:
                # A pooled connection that the server had just closed: it has not seen the request.
                response = await self._send(url, request.body, headers)
        except GatewayError:
            self.reachable = False
            raise
        except (aiohttp.ServerDisconnectedError, ConnectionResetError):
            self.reachable = False
            raise UpstreamGone(f"Upstream {self.name!r} closed the connection without an answer.") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.reachable = False
            raise UpstreamUnreachable(f"Upstream {self.name!r} can't be reached at {url}: {_reason(error)}.") from None
        self.reachable = True
        return HttpResponse(response, self._timeouts.idle_seconds, key=self._key)

    async def _send(self, url: URL, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        limit = self._timeouts.first_byte_seconds
        try:
            async with asyncio.timeout(limit):
                data = body if len(body) < _LARGE_BODY else io.BytesIO(body)  # a file is sent piece by piece
                return await self._clients.session(url).post(url, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ConnectionTimeoutError:
            limit = self._timeouts.connect_seconds
            raise UpstreamTimeout(f"Upstream {self.name!r} took no connection within {limit:g} s.") from None
        except TimeoutError:
            raise UpstreamTimeout(f"Upstream {self.name!r} gave no answer within {limit:g} s.") from None

    def _headers(self, request: RawRequest) -> dict[str, str]:
        seen = hops(request.headers)
        if self._hop_id in seen or len(seen) >= MAX_HOPS:
            raise LoopDetected(
                f"The request has come back to this gateway: upstream {self.name!r} leads here again. "
                "Check the base URL of the upstream, and of any proxy between."
            )
        return {
            **to_upstream(request.headers),
            **self._credentials(request.headers),
            HOP_HEADER: ", ".join([*seen, self._hop_id]),
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if request.stream else "application/json",
            "Accept-Encoding": "identity",
            **{name: request.headers[name] for name in _OURS if name in request.headers},
        }

    def _credentials(self, client: Mapping[str, str]) -> dict[str, str]:
        if self._key:
            return {"Authorization": f"Bearer {self._key}"}
        return client_credentials(client) if self._forward_client_key else {}

    async def models(self) -> Sequence[ModelCard]:
        """The settings' list, or the target's own, kept for a minute. Empty if it doesn't answer in time."""
        if self._listed:
            return [ModelCard(id=name, target=self.name, owned_by=self.name) for name in self._listed]
        if time.monotonic() < self._cards_until:
            return self._cards
        try:
            async with asyncio.timeout(_MODELS_SECONDS):
                self._cards = await self._fetch_models()
            self._cards_until = time.monotonic() + _MODELS_FRESH_SECONDS
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError):
            self._cards_until = time.monotonic() + _MODELS_RETRY_SECONDS
        return self._cards

    async def _fetch_models(self) -> Sequence[ModelCard]:
        url = URL(join_url(self._base, "/models"))
        headers = {"Accept-Encoding": "identity", HOP_HEADER: self._hop_id, **self._credentials({})}
        async with self._clients.session(url).get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            listed = msgspec.json.decode(await response.read(), type=dict[str, Any]).get("data")
        entries = listed if isinstance(listed, list) else []
        return [card for entry in entries if (card := _card(entry, self.name)) is not None]


def _card(entry: object, target: str) -> ModelCard | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        return None
    owner, created, length = entry.get("owned_by"), entry.get("created"), entry.get("max_model_len")
    return ModelCard(
        id=entry["id"],
        target=target,
        owned_by=owner if isinstance(owner, str) else target,
        created=created if isinstance(created, int) else 0,
        max_model_len=length if isinstance(length, int) else None,
        extra={name: value for name, value in entry.items() if name not in ("id", "object", "owned_by", "created")},
    )


def _reason(error: Exception) -> str:
    """What went wrong, without anything of the request: some libraries quote headers in their errors."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name is not known"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or "connection refused"
    if isinstance(error, ValueError):
        return "the URL, a header or the proxy setting is not valid"
    return type(error).__name__
