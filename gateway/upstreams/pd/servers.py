"""The servers of a pair: which there are, which are up, what each has said of itself. Asks them through `Probe`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.core.errors import GatewayError, ModeUnavailable, UpstreamTimeout, UpstreamUnreachable
from gateway.core.types import SIDES, Side
from gateway.settings.schema import PairEngine, PairSettings, TargetSettings, TimeoutSettings
from gateway.upstreams.choosing import Breaker
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from gateway.upstreams.pd.facts import ServerFacts, mismatch
from gateway.upstreams.pd.figures import Scraped
from gateway.upstreams.pd.probe import Probe
from gateway.upstreams.pd.server import NOT_ASKED, Server, ServerReport, double, not_asked, report

logger = logging.getLogger(__name__)

UP_SECONDS = 5.0  # between looks at servers that are all up
DOWN_SECONDS = 1.0
MAX_SILENT = 6  # a busy server may be slow to say that it is healthy; requests have deadlines of their own


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
        self,
        settings: PairSettings,
        clients: HttpClients,
        timeouts: TimeoutSettings,
        hop_id: str,
        probe: Probe,
        *,
        make_breaker: Callable[[], Breaker],
    ) -> None:
        self.engine: PairEngine = settings.engine
        self._probe = probe
        self._all = [
            Server(f"{side}-{i}", side, url, _client(settings, url, clients, timeouts, hop_id), make_breaker())
            for side in SIDES
            for i, url in enumerate(getattr(settings, side))
        ]
        self._wake = asyncio.Event()
        self._told: set[str] = set()  # problems that the log has been told

    def of(self, side: Side) -> Sequence[Server]:
        return [server for server in self._all if server.side == side]

    def named(self, name: str) -> Server:
        return next(server for server in self._all if server.name == name)

    def up(self, side: Side, only_url: str | None = None, without: Iterable[str] = ()) -> list[Server]:
        """Those that are not known to be down, each process once. A request may have to leave some of them alone."""
        left_out = set(without)
        return [
            server
            for server in self.of(side)
            if server.is_up is not False and server.name not in left_out and only_url in (None, server.base_url)
            if server.double_of is None
        ]

    def usable(self, side: Side, only_url: str | None = None, without: Iterable[str] = ()) -> list[Server]:
        """Of those that are up the ones that a request may go to. One that is silent only if there is no other."""
        found = [server for server in self.up(side, only_url, without) if server.breaker.wait_seconds() <= 0]
        return [server for server in found if not server.num_silent] or found

    def serves(self, side: Side) -> bool:
        """Whether one is up that isn't left alone. One that is being tried counts, so that this doesn't flicker."""
        return any(server.breaker.state != "open" for server in self.up(side))

    def has_pair(self) -> bool:
        """Whether a prefill and a decode server serve that aren't known not to belong together."""
        prefill, decode = (
            {server.name for server in self.up(side) if server.breaker.state != "open"}
            for side in ("prefill", "decode")
        )
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
        was_replaced = bool(is_up) and (server.was_seen_down or await self._was_replaced(server))
        if is_up and (server.is_up is False or was_replaced):
            server.process += 1
            self._forget(server)
            logger.info("%s at %s is up again", server.name, server.base_url)
        elif not is_up and server.is_up is not False:
            logger.warning("%s at %s is down: GET /health does not answer 200", server.name, server.base_url)
        if was_replaced:
            server.breaker.recovered()  # what a request alone took for down may be as ill as before
        server.is_up, server.was_seen_down = bool(is_up), not is_up

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
                yield server, double(server)

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

    def reports(self, scraped: Mapping[str, Scraped] | None = None) -> list[ServerReport]:
        known = scraped or {}
        return [report(server, known.get(server.name, NOT_ASKED)) for server in self._all]

    def pair_reports(self) -> list[PairReport]:
        return [
            PairReport(prefill.name, decode.name, True, mismatch(self.engine, prefill.facts, decode.facts))
            if prefill.facts is not None and decode.facts is not None
            else PairReport(prefill.name, decode.name, checked=False)
            for prefill in self.of("prefill")
            for decode in self.of("decode")
        ]

    async def figures(self) -> dict[str, Scraped]:
        """Of those that answer: whoever asks must not wait for the others."""
        asked = [server for server in self._all if server.is_up is not False and not server.num_silent]
        found = await asyncio.gather(*(self._probe.figures(server.root) for server in asked))
        said = {server.name: scraped for server, scraped in zip(asked, found, strict=True)}
        return {server.name: said.get(server.name) or not_asked(server) for server in self._all}


def _client(
    settings: PairSettings, url: str, clients: HttpClients, timeouts: TimeoutSettings, hop_id: str
) -> OpenAIHttpUpstream:
    target = TargetSettings(name=settings.name, base_url=url, api_key=settings.api_key, models=settings.models)
    return OpenAIHttpUpstream(target, clients, timeouts, hop_id)
