"""The servers of a pair: which there are, which are up, what each has said of itself. Asks them through `Probe`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from yarl import URL

from gateway.core.errors import GatewayError, ModeUnavailable, UpstreamTimeout, UpstreamUnreachable
from gateway.settings.schema import PairEngine, PairSettings, TargetSettings, TimeoutSettings
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from gateway.upstreams.pd.facts import ServerFacts, mismatch
from gateway.upstreams.pd.figures import PdFigures
from gateway.upstreams.pd.probe import Probe

logger = logging.getLogger(__name__)

Side = Literal["prefill", "decode", "merged"]
Unlearnt = UpstreamUnreachable | UpstreamTimeout
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
    num_unlearnt: int = 0  # times that it could not be asked who it is
    why_unlearnt: Unlearnt | None = None  # the last time
    double_of: str | None = None  # a server before it on its side, whose process it turned out to be

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
    problem: str | None = None  # why it is not used although it is up


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
        self._told: set[str] = set()  # problems that the log has been told

    def of(self, side: Side) -> Sequence[Server]:
        return [server for server in self._all if server.side == side]

    def named(self, name: str) -> Server:
        return next(server for server in self._all if server.name == name)

    def usable(self, side: Side, only_url: str | None = None, without: Iterable[str] = ()) -> list[Server]:
        """Those that are not known to be down, each process once. One that is silent only if there is no other."""
        left_out = set(without)
        found = [
            server
            for server in self.of(side)
            if server.is_up is not False and server.name not in left_out and only_url in (None, server.base_url)
            if server.double_of is None
        ]
        return [server for server in found if not server.num_silent] or found

    def has_pair(self) -> bool:
        """Whether a prefill and a decode server are up that aren't known not to belong together."""
        prefill, decode = ({server.name for server in self.usable(side)} for side in ("prefill", "decode"))
        reports = self.pair_reports()
        return any(one.prefill in prefill and one.decode in decode and one.problem is None for one in reports)

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
        if is_up and (server.is_up is False or await self._was_replaced(server)):
            server.process += 1
            self._forget(server)
            logger.info("%s at %s is up again", server.name, server.base_url)
        elif not is_up and server.is_up is not False:
            logger.warning("%s at %s is down: GET /health does not answer 200", server.name, server.base_url)
        server.is_up = bool(is_up)

    async def _was_replaced(self, server: Server) -> bool:
        """Mooncake's engine ids are in every request, and new in every process: also in one that came back unseen."""
        known = server.facts.ranks if server.facts is not None else ()
        if not known:
            return False
        ranks = await self._probe.ranks(server.root)
        return bool(ranks) and ranks != known

    def _forget(self, server: Server) -> None:
        """What was known of its earlier process, and of others only by that."""
        for one in self._all:
            if one is server or one.double_of == server.name:
                one.facts = one.double_of = None

    # ------------------------------------------------------------------------------------------------------ pairing

    async def check_pair(self, prefill: Server, decode: Server) -> None:
        """Raises ModeUnavailable for two that don't belong together, UpstreamUnreachable if one can't be asked."""
        problem = await self.problem_of(prefill, decode)
        if problem is not None:
            raise ModeUnavailable(
                f"{prefill.name} ({prefill.base_url}) and {decode.name} ({decode.base_url}): {problem}."
            )

    async def learn_all(self) -> None:
        """Ask what is up and wasn't asked yet, and tell the log what doesn't belong together. Raises nothing."""
        asked = [server for server in self._all if server.is_up and server.facts is None]
        await asyncio.gather(*(self._learn_quietly(server) for server in asked))
        problems = [f"{server.name} ({server.base_url}): {text}" for server, text in self._doubles()]
        problems += [
            f"{report.prefill} and {report.decode} are no pair: {report.problem}"
            for report in self.pair_reports()
            if report.problem is not None
        ]
        for problem in problems:
            if problem not in self._told:
                logger.error("%s", problem)
        self._told = set(problems)

    async def _learn_quietly(self, server: Server) -> None:
        with suppress(GatewayError):  # a request, or the next look, will find out
            await self.learn(server)

    def _doubles(self) -> Iterator[tuple[Server, str]]:
        for server in self._all:
            if server.double_of is not None:
                yield server, _double(server)

    async def problem_of(self, prefill: Server, decode: Server) -> str | None:
        for server in (prefill, decode):
            await self.learn(server)
        if prefill.facts is None or decode.facts is None:  # one of them has just come back: it is asked next time
            return None
        return mismatch(self.engine, prefill.facts, decode.facts)

    async def learn(self, server: Server) -> None:
        """Once in a process' life, whoever comes first for all. What it fails with, those get too who wait for it."""
        num_unlearnt = server.num_unlearnt
        async with server.learning:
            if server.facts is not None:
                return
            if server.why_unlearnt is not None and server.num_unlearnt > num_unlearnt:
                raise type(server.why_unlearnt)(server.why_unlearnt.message)
            try:
                await self._ask(server)
            except (UpstreamUnreachable, UpstreamTimeout) as error:
                server.num_unlearnt += 1
                server.why_unlearnt = type(error)(error.message)  # without the frames that this one keeps alive
                raise

    async def _ask(self, server: Server) -> None:
        process = server.process
        facts = await self._probe.facts(server.root, is_prefill=server.side == "prefill")
        if process == server.process and not self._lacks_ranks(server, facts):
            server.facts = facts
            server.double_of = self._earlier_same(server, facts)

    def _lacks_ranks(self, server: Server, facts: ServerFacts) -> bool:
        """Its bootstrap service isn't ready: what it says now must not be taken for all that it has."""
        return self.engine == "vllm-mooncake" and server.side == "prefill" and not facts.ranks

    def _earlier_same(self, server: Server, facts: ServerFacts) -> str | None:
        """Two addresses of one process would be taken for twice its room. Only a birth proves it: see `is_same`."""
        others = (other for other in self.of(server.side) if other is not server and other.double_of is None)
        births = {other.facts.birth: other.name for other in others if other.facts is not None}
        return births.get(facts.birth) if facts.birth else None

    # ------------------------------------------------------------------------------------------------------- reports

    def reports(self, figures: Mapping[str, PdFigures | None] | None = None) -> list[ServerReport]:
        states = {True: "up", False: "down", None: "not asked yet"}
        known = figures or {}
        return [
            ServerReport(
                server.name,
                server.side,
                server.base_url,
                states[server.is_up],
                known.get(server.name),
                _double(server) if server.double_of is not None else None,
            )
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
        """Of those that answer: whoever asks must not wait for the others."""
        asked = [server for server in self._all if server.is_up is not False and not server.num_silent]
        found = await asyncio.gather(*(self._probe.figures(server.root) for server in asked))
        said = {server.name: figures for server, figures in zip(asked, found, strict=True)}
        return {server.name: said.get(server.name) for server in self._all}


def _double(server: Server) -> str:
    return f"it is the same server as {server.double_of}, and is not used; name each server once"


def _client(
    settings: PairSettings, url: str, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str
) -> OpenAIHttpUpstream:
    target = TargetSettings(name=settings.name, base_url=url, api_key=settings.api_key, models=settings.models)
    return OpenAIHttpUpstream(target, clients, timeouts, hop_id)
