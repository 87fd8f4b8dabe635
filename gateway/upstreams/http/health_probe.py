"""Asks one server again and again whether it is well. Knows no requests, nor what follows from the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import aiohttp
from yarl import URL

from gateway.settings.base_url import normalise_base_url
from gateway.settings.schema import TargetSettings
from gateway.upstreams.http.clients import HttpClients

LIMIT_SECONDS = 2.5  # of one question, connecting included

logger = logging.getLogger(__name__)


class HealthProbe:
    """`start` it, once or more often, and `close` it. `told` hears of each answer: "" = well, else why not."""

    def __init__(
        self,
        target: TargetSettings,
        clients: HttpClients,
        told: Callable[[str], None],
        *,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        base, _ = normalise_base_url(target.base_url or "")
        self._path = target.health_path or "/"
        self._url = URL(str(URL(base).origin()).rstrip("/") + self._path)
        self._headers = _headers(target)
        self._seconds = target.health_seconds
        self._limit_seconds = limit_seconds
        self._name = target.name
        self._clients = clients
        self._told = told
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"health checks of {self._name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self._told(await self._why_ill())
            await asyncio.sleep(self._seconds)

    async def _why_ill(self) -> str:
        asked = f"GET {self._path}"
        try:
            async with asyncio.timeout(self._limit_seconds):
                status = await self._ask()
        except TimeoutError:
            return f"{asked} had no answer within {self._limit_seconds:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else None
            return f"{asked} had no answer ({said or type(error).__name__})"
        except Exception:
            logger.exception("a health check of %s failed", self._name)
            return f"{asked} could not be asked; the log says why"
        return "" if 200 <= status < 300 else f"{asked} answered {status}"

    async def _ask(self) -> int:
        """The status; whatever else the answer says is not read."""
        session = self._clients.session(self._url)
        async with session.get(self._url, headers=self._headers, allow_redirects=False) as response:
            return response.status


def _headers(target: TargetSettings) -> Mapping[str, str]:
    """With the target's own key, in the way of the APIs that it speaks. A client's key is not even known here."""
    key = target.api_key.get_secret_value().strip() if target.api_key else ""
    if not key:
        return {"Accept-Encoding": "identity"}
    speaks_openai = any(name.startswith("openai_") for name in target.dialects)
    credentials = {"Authorization": f"Bearer {key}"} if speaks_openai else {"x-api-key": key}
    return {"Accept-Encoding": "identity", **credentials}
