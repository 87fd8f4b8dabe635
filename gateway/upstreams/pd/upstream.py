"""Prefill and decode servers of another engine, and merged servers beside them, as one upstream of both modes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from gateway.core.errors import GatewayError, ModeUnavailable, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.types import SIDES, CacheMode, ModelCard, Side
from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest, RawResponse
from gateway.upstreams.choosing import Breaker, Chooser
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.pd.admission import Admission
from gateway.upstreams.pd.bodies import split_fields
from gateway.upstreams.pd.choice import choice_request, salted
from gateway.upstreams.pd.figures import Scraped
from gateway.upstreams.pd.job import Hold, Job, Stay
from gateway.upstreams.pd.judging import Judge
from gateway.upstreams.pd.legs import LegFailed
from gateway.upstreams.pd.picking import NoPartner, Picker
from gateway.upstreams.pd.plans import refuse_transfer_fields
from gateway.upstreams.pd.probe import Probe
from gateway.upstreams.pd.running import OnFailure, Runner
from gateway.upstreams.pd.server import Server, ServerReport
from gateway.upstreams.pd.servers import PairReport, Servers

logger = logging.getLogger(__name__)

_KNOW_NO_SALT = ("tensorrt-llm",)  # engines without `cache_salt`
_TELLING: tuple[Side, ...] = ("decode", "merged", "prefill")  # who is asked for the models, in order


class PairUpstream:
    """One `[[pairs]]` table. `start` begins to watch the servers; `close` ends that, and what is still to be told."""

    dialects: Sequence[str] = ("openai_chat", "openai_completions")

    def __init__(
        self,
        settings: PairSettings,
        clients: HttpClients,
        timeouts: TimeoutSettings,
        hop_id: str,
        *,
        make_chooser: Callable[[], Chooser],
        make_breaker: Callable[[], Breaker],
        on_failure: OnFailure = lambda side: None,
    ) -> None:
        self.name = settings.name
        self.engine = settings.engine
        self._settings = settings
        key = settings.api_key.get_secret_value().strip() if settings.api_key else ""
        probe = Probe(clients, key, settings.engine, settings.bootstrap_port)
        self._servers = Servers(settings, clients, timeouts, hop_id, probe, make_breaker=make_breaker)
        choosers: dict[Side, Chooser] = {side: make_chooser() for side in SIDES}
        self._judge = Judge(is_sole=len(settings.prefill) == len(settings.decode) == 1)
        self._picker = Picker(
            settings.name,
            self._servers,
            _admissions(settings),
            choosers,
            better_apart=self._judge.better_apart,
        )
        self._runner = Runner(settings, probe, self._judge, on_failure)
        self._on_failure = on_failure
        self._cards: Sequence[ModelCard] = [
            ModelCard(id=name, target=self.name, owned_by=self.name, modes=tuple(self.modes()))
            for name in settings.models
        ]
        self._watch: asyncio.Task[None] | None = None
        self._learning: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self._watch = asyncio.create_task(self._servers.watch(self._after_look))

    def _after_look(self) -> None:
        """What is up is asked who it is, so that servers that don't belong together are known before any request."""
        self._picker.serve_waiting()
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._servers.learn_all())

    async def close(self) -> None:
        for task in (self._watch, self._learning):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await self._runner.close()
        logger.info("target %s: its servers are no longer watched", self.name)

    # -------------------------------------------------------------------------------------------------------- reports

    @property
    def reachable(self) -> bool | None:
        """Whether any server is up; None = none was asked yet."""
        states = [report.state for report in self._servers.reports()]
        return True if "up" in states else None if "not asked yet" in states else False

    def modes(self) -> list[CacheMode]:
        """Modes that the settings give servers for."""
        has_split = bool(self._settings.prefill and self._settings.decode)
        given = {CacheMode.MERGED: bool(self._settings.merged), CacheMode.SPLIT: has_split}
        return [mode for mode, is_given in given.items() if is_given]

    def serves(self, mode: CacheMode) -> bool:
        """Whether a request in this mode would find servers at this moment; one that was never asked is tried."""
        if mode is CacheMode.MERGED:
            return self._servers.serves("merged")
        return self._servers.has_pair()

    def pair_reports(self) -> list[PairReport]:
        return self._servers.pair_reports()

    def server_reports(self, scraped: Mapping[str, Scraped] | None = None) -> list[ServerReport]:
        return self._servers.reports(scraped)

    async def figures(self) -> dict[str, Scraped]:
        """What each server exports at this moment, or why that isn't known."""
        return await self._servers.figures()

    @property
    def knows_models(self) -> bool:
        return bool(self._cards) or any(s.client.knows_models for side in _TELLING for s in self._servers.up(side))

    async def models(self) -> Sequence[ModelCard]:
        """Of the first server that tells; those of before while none does: a model doesn't go with its servers."""
        for server in [server for side in _TELLING for server in self._servers.up(side)]:
            if cards := await server.client.models():
                self._cards = [replace(card, modes=tuple(self.modes())) for card in cards]
                break
        return self._cards

    # ------------------------------------------------------------------------------------------------------- requests

    async def open(self, request: RawRequest) -> RawResponse:
        """The answer once its headers are there. Raises GatewayError; nothing has gone to the client by then."""
        strategy = request.strategy
        mode = strategy.mode if strategy is not None else CacheMode.SPLIT
        if mode not in self.modes():
            sides = "merged" if mode is CacheMode.MERGED else "prefill and decode"
            raise ModeUnavailable(f"Target {self.name!r} has no {sides} servers; it serves {', '.join(self.modes())}.")
        job = self._job(request)
        if mode is CacheMode.MERGED:
            return await self._merged(job)
        self._runner.plan.check(job.fields)
        self._take_endpoints(job)
        return await self._split(job)

    def _job(self, request: RawRequest) -> Job:
        said = split_fields(request.body)
        refuse_transfer_fields(said, self.engine)
        fields = said if self.engine in _KNOW_NO_SALT else salted(said, request.strategy)
        ask = choice_request(fields, request.headers.get("X-Request-Id", ""), request.strategy)
        return Job(request, fields, ask, is_changed=fields is not said)

    def _take_endpoints(self, job: Job) -> None:
        """Only addresses of this pair: a request must not choose where this server connects to.

        Before it comes here, an address that the settings don't know at all or that is another pair's was refused.
        """
        strategy = job.request.strategy
        if strategy is not None:
            job.only_prefill = self._own(job, "prefillEndpoint", strategy.prefill_endpoint, self._settings.prefill)
            job.only_decode = self._own(job, "decodeEndpoint", strategy.decode_endpoint, self._settings.decode)

    def _own(self, job: Job, name: str, url: str | None, own: Sequence[str]) -> str | None:
        if url is None or url in own:
            return url
        job.served.notices += (f"{name} is an address of another target and has no effect at {self.name}",)
        return None

    async def _split(self, job: Job) -> RawResponse:
        """At other servers as long as the ones that were chosen turn out not to be there."""
        while True:
            try:
                if self._runner.needs_no_decode(job.fields):
                    return await self._prefill_alone(job)
                return await self._attempt(job)
            except LegFailed as failure:
                self._learn(failure)
                self._on_failure(failure.server.side)
                if failure.was_asked:
                    raise _to_tell(failure, self._has_untried(job, failure)) from None
                job.tried.add(failure.server.name)
                if not self._has_others(job):
                    raise failure.error from None
            except NoPartner as lonely:
                job.tried.add(lonely.decode.name)
                if not self._has_others(job):
                    raise lonely.error from None

    async def _attempt(self, job: Job) -> RawResponse:
        decode, slot, decoding = await self._picker.place(job, "decode")
        prefilling: Stay | None = None
        try:
            prefill, prefilling = await self._picker.prefill(job, decode)
            served = job.served
            served.queue_seconds = time.monotonic() - job.arrived_at
            served.instance = f"{prefill.name} + {decode.name}"
            served.instance_reason = f"prefill {prefilling.reason}; decode {decoding.reason}"
            return await self._runner.split(job, prefill, decode, Hold(slot, decoding, prefilling))
        except BaseException as error:
            self._end(error, job, Hold(slot, decoding, prefilling))
            raise

    def _end(self, error: BaseException, job: Job, hold: Hold) -> None:
        if isinstance(error, LegFailed):
            self._judge.failed(error, job, hold)
        hold.release()

    async def _merged(self, job: Job) -> RawResponse:
        """One replica; another one if that isn't there."""
        while True:
            try:
                return await self._at_merged(job)
            except LegFailed as failure:
                self._learn(failure)
                job.tried.add(failure.server.name)
                if failure.was_asked:
                    raise _to_tell(failure, self._has_other_merged(job)) from None
                if not self._servers.usable("merged", None, job.tried):
                    raise failure.error from None

    async def _at_merged(self, job: Job) -> RawResponse:
        server, slot, assignment = await self._picker.place(job, "merged")
        job.served.queue_seconds = time.monotonic() - job.arrived_at
        hold = Hold(slot, assignment)
        has_others = self._has_other_merged(job, server.name)
        return await self._plain(job, server, CacheMode.MERGED, hold, assignment.reason, has_others=has_others)

    async def _prefill_alone(self, job: Job) -> RawResponse:
        server, assignment = self._picker.one(job, "prefill", job.only_prefill)
        why = f"one token, made by prefill alone; {assignment.reason}"
        return await self._plain(job, server, CacheMode.SPLIT, Hold(None, assignment), why)

    async def _plain(
        self, job: Job, server: Server, mode: CacheMode, hold: Hold, reason: str, *, has_others: bool = False
    ) -> RawResponse:
        job.served.instance, job.served.instance_reason = server.name, reason
        try:
            return await self._runner.plain(job, server, mode, hold, has_others=has_others)
        except BaseException as error:
            self._end(error, job, hold)
            raise

    def _learn(self, failure: LegFailed) -> None:
        """A server that took no connection is down; of one that broke one, the next look decides."""
        if failure.took_no_connection:
            self._servers.mark_down(failure.server, failure.error.message)
        elif isinstance(failure.error, UpstreamGone | UpstreamTimeout):
            self._servers.look_soon()

    def _has_other_merged(self, job: Job, *besides: str) -> bool:
        return bool(self._servers.usable("merged", None, {*job.tried, *job.request.failed_at, *besides}))

    def _has_others(self, job: Job) -> bool:
        """Whether it can go on without those that were tried."""
        return all(self._servers.usable(side, only, job.tried) for side, only in self._needed(job))

    def _has_untried(self, job: Job, failure: LegFailed) -> bool:
        """Whether a retry would go to another server than the one that has failed, or that may have."""
        failed_at = {*job.tried, *job.request.failed_at}
        untried = {side for side, only in self._needed(job) if self._servers.usable(side, only, failed_at)}
        has_other = bool(untried) if failure.is_shared else failure.server.side in untried
        return has_other and self._has_others(job)

    def _needed(self, job: Job) -> list[tuple[Side, str | None]]:
        prefill: tuple[Side, str | None] = ("prefill", job.only_prefill)
        decode: tuple[Side, str | None] = ("decode", job.only_decode)
        return [prefill] if self._runner.needs_no_decode(job.fields) else [prefill, decode]


def _to_tell(failure: LegFailed, has_others: bool) -> GatewayError:
    """What is final of one server isn't of the target while there is another one, which may be asked at once."""
    error = failure.error
    if has_others and isinstance(error, UpstreamError) and error.status >= 500:
        error.is_final, error.retry_after_seconds = False, None
    return error


def _admissions(settings: PairSettings) -> dict[Side, Admission]:
    limits: dict[Side, int | None] = {"decode": settings.max_running, "merged": settings.merged_max_running}
    return {
        side: Admission(
            side,
            max_running=most,
            max_waiting=settings.max_waiting,
            timeout_seconds=settings.queue_timeout_seconds,
        )
        for side, most in limits.items()
    }
