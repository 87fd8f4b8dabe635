"""Questions to prefill and decode servers besides requests: health, facts, figures, aborts. Decides nothing."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from gateway.core.errors import UpstreamTimeout, UpstreamUnreachable
from gateway.settings.pair_checks import is_this_host
from gateway.settings.schema import PairEngine
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.pd.facts import Address, ServerFacts, model_facts, mooncake_ranks, sglang_facts
from gateway.upstreams.pd.figures import Scraped, read_birth, read_cache_dtype, scraped
from gateway.upstreams.pd.plans import DEFAULT_BOOTSTRAP_PORT, DataRank

_PROBE_SECONDS = 5.0
_FACTS_SECONDS = 20.0  # a busy server is slow to tell, and a request waits for it
_MAX_ANSWER = 16 * 1024 * 1024
_SGLANG: tuple[PairEngine, ...] = ("sglang",)


class Probe:
    """One for all servers of a pair."""

    def __init__(self, clients: HttpClients, key: str, engine: PairEngine, bootstrap_port: int | None) -> None:
        self._clients = clients
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._engine = engine
        self._bootstrap_port = bootstrap_port

    async def is_healthy(self, root: str) -> bool | None:
        """None: it takes connections and says nothing in time. That may be a hung server, or one with much to do."""
        try:
            return (await self._get(f"{root}/health"))[0] == 200
        except UpstreamTimeout:
            return None
        except UpstreamUnreachable:
            return False

    async def facts(self, root: str, *, is_prefill: bool) -> ServerFacts:
        """What the server says of itself; a question it doesn't know is left out.

        Raises UpstreamUnreachable, or UpstreamTimeout.
        """
        version, models, metrics = await asyncio.gather(
            self._json(f"{root}/version"),
            self._json(f"{root}/v1/models"),
            self._get(f"{root}/metrics", _FACTS_SECONDS),
        )
        said = version.get("version") if isinstance(version, dict) else None
        known: dict[str, Any] = {"version": said if isinstance(said, str) and said else None, **model_facts(models)}
        if metrics[0] == 200:
            text = metrics[1].decode("utf-8", "replace")
            known |= {"birth": read_birth(text), "kv_dtype": read_cache_dtype(text)}
        known["addresses"] = await _addresses(URL(root))
        if self._engine in _SGLANG:
            known |= sglang_facts(await self._json(f"{root}/server_info"))
        facts = ServerFacts(**known)
        port = self._bootstrap_port or facts.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
        if self._engine == "vllm-mooncake" and is_prefill:
            facts = replace(facts, ranks=await self._ranks(root, port))
        return replace(facts, bootstrap_port=port)

    async def ranks(self, root: str) -> tuple[DataRank, ...]:
        """Of a Mooncake prefill server; none if its bootstrap service doesn't tell."""
        try:
            return await self._ranks(root, self._bootstrap_port or DEFAULT_BOOTSTRAP_PORT)
        except (UpstreamUnreachable, UpstreamTimeout):
            return ()

    async def _ranks(self, root: str, port: int) -> tuple[DataRank, ...]:
        query = URL(root).with_port(port).with_scheme("http").with_path("/query")
        return mooncake_ranks(await self._json(str(query)))

    async def figures(self, root: str) -> Scraped:
        """What the server exports at this moment, or why that isn't known."""
        try:
            status, body = await self._get(f"{root}/metrics")
        except UpstreamTimeout:
            return Scraped(missing=f"GET /metrics gave no answer within {_PROBE_SECONDS:g} s")
        except UpstreamUnreachable:
            return Scraped(missing="GET /metrics gave no answer: the server can't be reached, or broke off")
        return scraped(status, body.decode("utf-8", "replace"))

    async def abort(self, url: str, rid: str) -> None:
        """Best effort: the connection's end is an abort too, only a later one."""
        body, headers = msgspec.json.encode({"rid": rid, "abort_all": False}), {"Content-Type": "application/json"}
        target = URL(url)
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                session = self._clients.session(target)
                async with session.post(target, data=body, headers=headers | self._headers) as response:
                    await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass

    async def _json(self, url: str) -> Any:
        status, body = await self._get(url, _FACTS_SECONDS)
        if status != 200:
            return None
        try:
            return msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return None

    async def _get(self, url: str, seconds: float = _PROBE_SECONDS) -> tuple[int, bytes]:
        target = URL(url)
        try:
            async with asyncio.timeout(seconds):
                session = self._clients.session(target)
                async with session.get(target, headers=self._headers, allow_redirects=False) as response:
                    return response.status, await _limited(response)
        except TimeoutError:
            raise UpstreamTimeout(f"{url} gave no answer within {seconds:g} s.") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamUnreachable(f"{url} can't be reached: {type(error).__name__}.") from None


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for chunk in response.content.iter_any():
        found += chunk
        if len(found) > _MAX_ANSWER:
            raise ValueError("too long")
    return bytes(found)


async def _addresses(url: URL) -> frozenset[Address]:
    """Where the name leads. Every name of this host is one address: a server there is reached by any of them."""
    host, port, path = url.host or "", url.port or 80, url.path.rstrip("/")
    if is_this_host(host):
        return frozenset({("loopback", port, path)})
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    hosts = {str(address[4][0]) for address in found}
    return frozenset(("loopback" if is_this_host(name) else name, port, path) for name in hosts)
