"""Prefill and decode servers of another engine, and merged servers beside them, as one upstream of both modes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from gateway.core.errors import InvalidRequest, ModeUnavailable, UpstreamGone, UpstreamTimeout
from gateway.core.types import CacheMode, ModelCard
from gateway.settings.schema import PairSettings, TimeoutSettings
from gateway.upstreams.attempts import Assignment, Chooser
from gateway.upstreams.base import RawRequest, RawResponse
from gateway.upstreams.http_clients import HttpClients
from gateway.upstreams.pd_admission import Admission
from gateway.upstreams.pd_bodies import split_fields
from gateway.upstreams.pd_choice import choice_request, salted
from gateway.upstreams.pd_figures import PdFigures
from gateway.upstreams.pd_job import Hold, Job
from gateway.upstreams.pd_legs import LegFailed
from gateway.upstreams.pd_picking import Picker
from gateway.upstreams.pd_plans import refuse_transfer_fields
from gateway.upstreams.pd_probe import Probe
from gateway.upstreams.pd_running import OnFailure, Runner
from gateway.upstreams.pd_servers import SIDES, PairReport, ServerReport, Servers, Side

_KNOW_NO_SALT = ("tensorrt-llm",)  # engines without `cache_salt`


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
        on_failure: OnFailure = lambda side: None,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self.name = settings.name
        self.engine = settings.engine
        self._settings = settings
        self._elsewhere = elsewhere  # addresses that stand for another target
        key = settings.api_key.get_secret_value().strip() if settings.api_key else ""
        probe = Probe(clients, key, settings.engine, settings.bootstrap_port)
        self._servers = Servers(settings, clients, timeouts, hop_id, probe)
        self._admission = Admission(
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            timeout_seconds=settings.queue_timeout_seconds,
        )
        choosers: dict[Side, Chooser] = {side: make_chooser() for side in SIDES}
        self._picker = Picker(settings.name, self._servers, self._admission, choosers)
        self._runner = Runner(settings, probe, on_failure)
        self._on_failure = on_failure
        self._cards: Sequence[ModelCard] = [
            ModelCard(id=name, target=self.name, owned_by=self.name, modes=tuple(self.modes()))
            for name in settings.models
        ]
        self._watch: asyncio.Task[None] | None = None

    # ----------------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self._watch = asyncio.create_task(self._servers.watch(self._admission.serve))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._runner.close()

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

    def pair_reports(self) -> list[PairReport]:
        return self._servers.pair_reports()

    def server_reports(self, figures: Mapping[str, PdFigures | None] | None = None) -> list[ServerReport]:
        return self._servers.reports(figures)

    async def figures(self) -> dict[str, PdFigures | None]:
        """What each server exports at this moment; None = nothing."""
        return await self._servers.figures()

    async def models(self) -> Sequence[ModelCard]:
        """Of the first server that tells; those of before while none does: a model doesn't go with its servers."""
        for server in [*self._servers.usable("decode"), *self._servers.usable("merged")]:
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
        refuse_transfer_fields(said)
        fields = said if self.engine in _KNOW_NO_SALT else salted(said, request.strategy)
        ask = choice_request(fields, request.headers.get("X-Request-Id", ""), request.strategy)
        return Job(request, fields, ask, is_changed=fields is not said)

    def _take_endpoints(self, job: Job) -> None:
        """Only addresses of this pair: a request must not choose where this server connects to."""
        strategy = job.request.strategy
        if strategy is not None:
            job.only_prefill = self._own(job, "prefillEndpoint", strategy.prefill_endpoint, self._settings.prefill)
            job.only_decode = self._own(job, "decodeEndpoint", strategy.decode_endpoint, self._settings.decode)

    def _own(self, job: Job, name: str, url: str | None, own: Sequence[str]) -> str | None:
        if url is None or url in own:
            return url
        if url in self._elsewhere:
            job.served.notices += (f"{name} is an address of another target and has no effect at {self.name}",)
            return None
        raise InvalidRequest(f"{name} is none of the addresses of target {self.name!r}.", param=name)

    async def _split(self, job: Job) -> RawResponse:
        """At other servers as long as the ones that were chosen turn out not to be there."""
        while True:
            try:
                if self._runner.needs_no_decode(job.fields):
                    why = "one token, made by prefill alone"
                    return await self._at_one(job, "prefill", CacheMode.SPLIT, job.only_prefill, why)
                return await self._attempt(job)
            except LegFailed as failure:
                self._learn(failure)
                self._on_failure(failure.server.side)
                job.tried.add(failure.server.name)
                if not failure.was_not_asked or not self._has_others(job):
                    raise failure.error from None

    async def _attempt(self, job: Job) -> RawResponse:
        decode, slot, decoding = await self._picker.decode(job)
        prefilling: Assignment | None = None
        try:
            prefill, prefilling = await self._picker.prefill(job, decode)
            served = job.served
            served.queue_seconds = time.monotonic() - job.arrived_at
            served.instance = f"{prefill.name} + {decode.name}"
            served.instance_reason = f"prefill {prefilling.reason}; decode {decoding.reason}"
            return await self._runner.split(job, prefill, decode, Hold(slot, decoding, prefilling))
        except BaseException:
            Hold(slot, decoding, prefilling).release()
            raise

    async def _merged(self, job: Job) -> RawResponse:
        """One replica; another one if that isn't there."""
        while True:
            try:
                return await self._at_one(job, "merged", CacheMode.MERGED)
            except LegFailed as failure:
                self._learn(failure)
                job.tried.add(failure.server.name)
                if not failure.was_not_asked or not self._servers.usable("merged", None, job.tried):
                    raise failure.error from None

    async def _at_one(
        self, job: Job, side: Side, mode: CacheMode, only_url: str | None = None, why: str = ""
    ) -> RawResponse:
        server, assignment = self._picker.one(job, side, only_url)
        job.served.instance = server.name
        job.served.instance_reason = f"{why}; {assignment.reason}" if why else assignment.reason
        try:
            return await self._runner.plain(job, server, mode, Hold(None, assignment))
        except BaseException:
            assignment.done()
            raise

    def _learn(self, failure: LegFailed) -> None:
        """A server that took no connection is down; of one that broke one, the next look decides."""
        if failure.was_not_asked:
            self._servers.mark_down(failure.server, failure.error.message)
        elif isinstance(failure.error, UpstreamGone | UpstreamTimeout):
            self._servers.look_soon()

    def _has_others(self, job: Job) -> bool:
        has_prefill = bool(self._servers.usable("prefill", job.only_prefill, job.tried))
        return has_prefill and bool(self._servers.usable("decode", job.only_decode, job.tried))
