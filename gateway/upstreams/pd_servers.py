"""The servers of a pair: which there are, which are up, what each has said of itself. Asks them through `Probe`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from yarl import URL

from gateway.core.errors import ModeUnavailable
from gateway.settings.schema import PairEngine, PairSettings, TargetSettings, TimeoutSettings
from gateway.upstreams.http_clients import HttpClients
from gateway.upstreams.openai_http import OpenAIHttpUpstream
from gateway.upstreams.pd_facts import ServerFacts, mismatch
from gateway.upstreams.pd_figures import PdFigures
from gateway.upstreams.pd_probe import Probe

logger = logging.getLogger(__name__)

Side = Literal["prefill", "decode", "merged"]
SIDES: tuple[Side, ...] = ("prefill", "decode", "merged")
_VERSION = re.compile(r"/(?:v\d+(?:(?:alpha|beta)\d*)?|openai)$", re.I)
UP_SECONDS = 5.0  # between looks at servers that are all up
DOWN_SECONDS = 1.0
MAX_SILENT = 6  # a busy server may be slow to say that it is healthy; requests have deadlines of their own


@dataclass(slots=True, eq=False)
class Server:
    """One address. `process` counts its lives: what was known of an earlier one doesn't hold."""

    name: str
    side: Side
    base_url: str
    client: OpenAIHttpUpstream
    is_up: bool | None = None  # None = never asked; it is tried
    process: int = 0
    facts: ServerFacts | None = field(default=None, repr=False)
    num_silent: int = 0  # looks in a row at which it took the connection and said nothing
    learning: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def root(self) -> str:
        """Where the server's own pages are, besides those of the API."""
        return _VERSION.sub("", self.base_url)

    @property
    def host(self) -> str:
        return URL(self.base_url).host or ""

    @property
    def port(self) -> int:
        return URL(self.base_url).port or 80

    @property
    def instance(self) -> tuple[str, int]:
        return self.name, self.process


@dataclass(frozen=True, slots=True)
class ServerReport:
    """One server, for whoever looks at the gateway."""

    name: str
    side: str
    url: str
    state: str  # up, down or not asked yet
    figures: PdFigures | None = None


@dataclass(frozen=True, slots=True)
class PairReport:
    """One prefill with one decode server. `problem` says why they are no pair; None = nothing is known against it."""

    prefill: str
    decode: str
    checked: bool
    problem: str | None = None


class Servers:
    """All of one pair. `watch` keeps an eye on them until it is cancelled."""

    def __init__(
        self, settings: PairSettings, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str, probe: Probe
    ) -> None:
        self.engine: PairEngine = settings.engine
        self._probe = probe
        self._all = [
            Server(f"{side}-{i}", side, url, _client(settings, url, clients, timeouts, hop_id))
            for side in SIDES
            for i, url in enumerate(getattr(settings, side))
        ]
        self._wake = asyncio.Event()

    def of(self, side: Side) -> Sequence[Server]:
        return [server for server in self._all if server.side == side]

    def named(self, name: str) -> Server:
        return next(server for server in self._all if server.name == name)

    def usable(self, side: Side, only_url: str | None = None, without: Iterable[str] = ()) -> list[Server]:
        """Those that are not known to be down."""
        left_out = set(without)
        return [
            server
            for server in self.of(side)
            if server.is_up is not False and server.name not in left_out and only_url in (None, server.base_url)
        ]

    # ------------------------------------------------------------------------------------------------------- health

    def mark_down(self, server: Server, why: str) -> None:
        """A request found out. The next look decides when it is up again."""
        if server.is_up is not False:
            logger.warning("%s at %s is down: %s", server.name, server.base_url, why)
        server.is_up = False
        self._wake.set()

    def look_soon(self) -> None:
        self._wake.set()

    async def watch(self, on_change: Callable[[], None]) -> None:
        while True:
            await asyncio.gather(*(self._look(server) for server in self._all))
            on_change()
            all_up = all(server.is_up for server in self._all)
            with suppress(TimeoutError):
                async with asyncio.timeout(UP_SECONDS if all_up else DOWN_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    async def _look(self, server: Server) -> None:
        is_up = await self._probe.is_healthy(server.root)
        server.num_silent = server.num_silent + 1 if is_up is None else 0
        if is_up is None and server.num_silent < MAX_SILENT:
            return
        if is_up and server.is_up is False:
            server.process += 1
            server.facts = None
            logger.info("%s at %s is up again", server.name, server.base_url)
        elif not is_up and server.is_up is not False:
            logger.warning("%s at %s is down: GET /health does not answer 200", server.name, server.base_url)
        server.is_up = bool(is_up)

    # ------------------------------------------------------------------------------------------------------ pairing

    async def check_pair(self, prefill: Server, decode: Server) -> None:
        """Raises ModeUnavailable for two that don't belong together, UpstreamUnreachable if one can't be asked."""
        problem = await self.problem_of(prefill, decode)
        if problem is not None:
            raise ModeUnavailable(
                f"{prefill.name} ({prefill.base_url}) and {decode.name} ({decode.base_url}): {problem}."
            )

    async def problem_of(self, prefill: Server, decode: Server) -> str | None:
        for server in (prefill, decode):
            await self.learn(server)
        if prefill.facts is None or decode.facts is None:  # one of them has just come back: it is asked next time
            return None
        return mismatch(self.engine, prefill.facts, decode.facts)

    async def learn(self, server: Server) -> None:
        """Once in a process' life, whoever comes first for all."""
        async with server.learning:
            if server.facts is None:
                process = server.process
                facts = await self._probe.facts(server.root, is_prefill=server.side == "prefill")
                server.facts = facts if process == server.process else None

    # ------------------------------------------------------------------------------------------------------- reports

    def reports(self, figures: Mapping[str, PdFigures | None] | None = None) -> list[ServerReport]:
        states = {True: "up", False: "down", None: "not asked yet"}
        known = figures or {}
        return [
            ServerReport(server.name, server.side, server.base_url, states[server.is_up], known.get(server.name))
            for server in self._all
        ]

    def pair_reports(self) -> list[PairReport]:
        return [
            PairReport(prefill.name, decode.name, True, mismatch(self.engine, prefill.facts, decode.facts))
            if prefill.facts is not None and decode.facts is not None
            else PairReport(prefill.name, decode.name, checked=False)
            for prefill in self.of("prefill")
            for decode in self.of("decode")
        ]

    async def figures(self) -> dict[str, PdFigures | None]:
        found = await asyncio.gather(*(self._probe.figures(server.root) for server in self._all))
        return {server.name: figures for server, figures in zip(self._all, found, strict=True)}


def _client(
    settings: PairSettings, url: str, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str
) -> OpenAIHttpUpstream:
    target = TargetSettings(name=settings.name, base_url=url, api_key=settings.api_key, models=settings.models)
    return OpenAIHttpUpstream(target, clients, timeouts, hop_id)
