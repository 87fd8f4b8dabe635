"""An OpenAI-compatible server over HTTP: the client's bytes go there, the answer's bytes come back.

Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from gateway.core.errors import GatewayError, LoopDetected, UpstreamTimeout
from gateway.core.types import ModelCard
from gateway.settings.base_url import join_url, normalise_base_url
from gateway.settings.schema import TargetSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http_answer import HttpResponse
from gateway.upstreams.http_clients import HttpClients, Sent
from gateway.upstreams.http_failures import failure_to_send
from gateway.upstreams.http_headers import HOP_HEADER, MAX_HOPS, client_credentials, hops, to_upstream
from gateway.upstreams.proxies import is_loopback

__all__ = ["HttpClients", "HttpResponse", "OpenAIHttpUpstream", "is_loopback"]

_LARGE_BODY = 512 * 1024
_OURS = ("X-Cache-Mode", "X-Request-Id")  # the service fills them in
_MODELS_SECONDS = 2.5  # clients give a model list three seconds
_MODELS_FRESH_SECONDS = 60.0
_MODELS_RETRY_SECONDS = 5.0
_MAX_LIST_BYTES = 16 * 1024**2


class OpenAIHttpUpstream:
    """One target. Its key goes there and nowhere else."""

    kind = "openai"

    def __init__(self, target: TargetSettings, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str) -> None:
        self.name = target.name
        self.dialects = target.dialects
        self._base, self.notices = normalise_base_url(target.base_url or "")
        self._key = target.api_key.get_secret_value().strip() if target.api_key else ""
        self._forward_client_key = target.forward_client_key and not self._key
        self._listed = target.models
        self._urls: dict[str, URL] = {}
        self._clients = clients
        self._timeouts = timeouts
        self._hop_id = hop_id
        self._cards: Sequence[ModelCard] = ()
        self._cards_until = 0.0
        self.reachable: bool | None = None  # by the last request; None = none yet

    async def open(self, request: RawRequest) -> HttpResponse:
        """Send the request and wait for the headers of the answer."""
        url = self._url(request.path)
        headers = self._headers(request)
        try:
            response = await self._send_safely(url, request.body, headers)
        except GatewayError:
            self.reachable = False
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.reachable = False
            raise failure_to_send(error, self.name, url) from None
        self.reachable = True
        return HttpResponse(response, self._timeouts.idle_seconds, key=self._key)

    def _url(self, path: str) -> URL:
        """Of the few paths that there are; made once."""
        found = self._urls.get(path)
        if found is None:
            found = self._urls[path] = URL(join_url(self._base, path))
        return found

    async def _send_safely(self, url: URL, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Once more, if it went over a pooled connection that the server was closing: it has not seen the request."""
        sent = Sent()
        try:
            return await self._send(url, body, headers, sent)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not sent.reused:
                raise
        return await self._send(url, body, headers, Sent())

    async def _send(self, url: URL, body: bytes, headers: Mapping[str, str], sent: Sent) -> aiohttp.ClientResponse:
        limit = self._timeouts.first_byte_seconds
        data = body if len(body) < _LARGE_BODY else io.BytesIO(body)  # a file is sent piece by piece
        try:
            async with asyncio.timeout(limit):
                return await self._clients.session(url).post(
                    url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=sent
                )
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
            **self._credentials(request.headers, request.key_header),
            HOP_HEADER: ", ".join([*seen, self._hop_id]),
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if request.stream else "application/json",
            "Accept-Encoding": "identity",
            **{name: request.headers[name] for name in _OURS if name in request.headers},
            **request.own_headers,
        }

    def _credentials(self, client: Mapping[str, str], key_header: str = "Authorization") -> dict[str, str]:
        if self._key:
            return {key_header: f"Bearer {self._key}" if key_header == "Authorization" else self._key}
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
        except (TimeoutError, aiohttp.ClientError, GatewayError, OSError, ValueError, msgspec.MsgspecError):
            self._cards_until = time.monotonic() + _MODELS_RETRY_SECONDS
        return self._cards

    async def _fetch_models(self) -> Sequence[ModelCard]:
        url = URL(join_url(self._base, "/models"))
        headers = {"Accept-Encoding": "identity", HOP_HEADER: self._hop_id, **self._credentials({})}
        async with self._clients.session(url).get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            answer = HttpResponse(response, _MODELS_SECONDS)
            try:
                listed = msgspec.json.decode(await _limited(answer), type=dict[str, Any]).get("data")
            finally:
                await answer.close()
        entries = listed if isinstance(listed, list) else []
        return [card for entry in entries if (card := _card(entry, self.name)) is not None]


async def _limited(answer: HttpResponse) -> bytes:
    body = bytearray()
    async for chunk in answer.chunks():
        body += chunk
        if len(body) > _MAX_LIST_BYTES:
            raise ValueError("the list is too long")
    return bytes(body)


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
