"""An OpenAI-compatible server over HTTP: the client's bytes go there, the answer's bytes come back.

Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
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
from gateway.upstreams.http.answer import HttpAnswer, HttpResponse
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.failures import failure_to_send
from gateway.upstreams.http.headers import HOP_HEADER, MAX_HOPS, client_credentials, hops, to_upstream
from gateway.upstreams.http.http1_errors import ConnectTimedOut, Http1Error

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
        self.knows_models = bool(target.models)
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
            answer = await self._send(url, request, headers)
        except GatewayError:
            self.reachable = False
            raise
        except (Http1Error, aiohttp.ClientError, OSError, ValueError) as error:
            self.reachable = False
            raise failure_to_send(error, self.name, url) from None
        self.reachable = True
        return HttpResponse(answer, self._timeouts.idle_seconds, key=self._key)

    def address(self, path: str) -> str:
        """Where a request is sent, for error texts. A base URL holds no user name, password or query."""
        return str(self._url(path))

    def _url(self, path: str) -> URL:
        """Of the few paths that there are; made once."""
        found = self._urls.get(path)
        if found is None:
            found = self._urls[path] = URL(join_url(self._base, path))
        return found

    async def _send(self, url: URL, request: RawRequest, headers: Mapping[str, str]) -> HttpAnswer:
        limit = self._timeouts.first_byte_seconds
        try:
            async with asyncio.timeout(limit):
                return await self._clients.request("POST", url, headers, request.body, on_resent=request.on_resent)
        except ConnectTimedOut:
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
            self.knows_models = True
            self._cards_until = time.monotonic() + _MODELS_FRESH_SECONDS
        except (Http1Error, aiohttp.ClientError, GatewayError, OSError, ValueError, msgspec.MsgspecError) as error:
            self.knows_models |= isinstance(error, ValueError | msgspec.MsgspecError)  # an answer, though no list
            self._cards_until = time.monotonic() + _MODELS_RETRY_SECONDS
        return self._cards

    async def _fetch_models(self) -> Sequence[ModelCard]:
        url = URL(join_url(self._base, "/models"))
        headers = {"Accept-Encoding": "identity", HOP_HEADER: self._hop_id, **self._credentials({})}
        answer = HttpResponse(await self._clients.request("GET", url, headers), _MODELS_SECONDS)
        try:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
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
