"""One attempt at chosen servers: the plan's legs are sent, and what comes back becomes an answer to read."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.core.errors import GatewayError
from gateway.core.types import CacheMode
from gateway.settings.schema import PairSettings
from gateway.upstreams.base import RawRequest, RawResponse, Served
from gateway.upstreams.pd.answer import as_stream, prefills_own
from gateway.upstreams.pd.bodies import Fields, value
from gateway.upstreams.pd.job import Hold, Job
from gateway.upstreams.pd.legs import LegFailed, Opened, PrefillEnd, Run, run_concurrent, run_sequential
from gateway.upstreams.pd.plans import (
    PLANS,
    Attempt,
    ConcurrentPlan,
    LlmD,
    Sglang,
    Store,
    TensorRT,
    VllmMooncake,
    VllmPull,
)
from gateway.upstreams.pd.probe import Probe
from gateway.upstreams.pd.response import PlainAnswer, SplitAnswer, WholeAnswer
from gateway.upstreams.pd.servers import Server, Side

OnFailure = Callable[[Side], None]


class Runner:
    """Knows the engine's protocol. `close` waits for aborts that are still on their way."""

    def __init__(self, settings: PairSettings, probe: Probe, on_failure: OnFailure) -> None:
        self.plan = PLANS[settings.engine]()
        self._settings = settings
        self._probe = probe
        self._on_failure = on_failure
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._background)

    def needs_no_decode(self, fields: Fields) -> bool:
        """The prefill server alone answers it."""
        return isinstance(self.plan, VllmPull | Store | TensorRT) and self.plan.needs_no_decode(fields)

    async def plain(self, job: Job, server: Server, mode: CacheMode, hold: Hold) -> RawResponse:
        """One server answers alone."""
        return await self._plain(job, server, job.plain_request(), mode, hold)

    async def split(self, job: Job, prefill: Server, decode: Server, hold: Hold) -> RawResponse:
        run, plan = self._run(job, prefill, decode), self.plan
        match plan:
            case LlmD():
                request = job.plain_request(plan.decode(job.fields, run.attempt).own_headers)
                return await self._plain(job, decode, request, CacheMode.SPLIT, hold)
            case VllmPull() | Store() | TensorRT():
                return self._answer(job, run, await run_sequential(plan, run), hold)
            case Sglang() | VllmMooncake():
                return self._answer(job, run, await self._concurrent(plan, run), hold)

    async def _concurrent(self, plan: ConcurrentPlan, run: Run) -> Opened:
        try:
            opened = await run_concurrent(plan, run)
        except BaseException:
            self._abort(run)
            raise
        if opened.response is None:
            self._abort(run)  # the prefill refused, and the decode server waits for it
        return opened

    def _run(self, job: Job, prefill: Server, decode: Server) -> Run:
        facts, unique = prefill.facts, uuid.uuid4().hex
        attempt = Attempt(
            request_id=f"{job.ask.request_id or 'request'}-{unique[:8]}",
            rid=unique,
            room=secrets.randbits(63),
            prefill_host=prefill.host,
            prefill_port=prefill.port,
            bootstrap_port=facts.bootstrap_port if facts else self._settings.bootstrap_port,
            ranks=facts.ranks if facts else (),
            is_chat="messages" in job.fields,
        )
        return Run(
            request=job.request,
            fields=job.fields,
            attempt=attempt,
            prefill=prefill,
            decode=decode,
            prefill_seconds=self._settings.prefill_timeout_seconds,
            handoff_seconds=self._settings.handoff_timeout_seconds,
        )

    async def _plain(self, job: Job, server: Server, request: RawRequest, mode: CacheMode, hold: Hold) -> RawResponse:
        try:
            response = await server.client.open(request)
        except GatewayError as error:
            raise LegFailed(server, error) from None
        return PlainAnswer(response, job.served, mode, on_first=hold.decoding.first_token, on_close=hold.release)

    def _answer(self, job: Job, run: Run, opened: Opened, hold: Hold) -> RawResponse:
        opened.prefill.add_done_callback(lambda ended: _note_prefill(ended, job.served, hold))
        if opened.prefill.done():
            _note_prefill(opened.prefill, job.served, hold)  # the callback comes only later
        if opened.response is None:
            hold.release()
            end = opened.prefill.result()
            job.served.instance = run.prefill.name  # it alone has answered
            _note_refusal(job, run.prefill, end.status)
            return _whole(job, end)
        _note_refusal(job, run.decode, opened.response.status)

        def closed(both_ended: bool) -> None:
            hold.release()
            if not both_ended:
                self._abort(run)

        return SplitAnswer(
            opened.response,
            opened.prefill,
            job.served,
            handoff_seconds=run.handoff_seconds,
            asked_at=opened.asked_at,
            on_first=hold.decoding.first_token,
            on_failure=self._on_failure,
            on_close=closed,
        )

    def _abort(self, run: Run) -> None:
        """Tell both servers, where there is a way to: they notice a closed connection only later."""
        path = self.plan.abort_path if isinstance(self.plan, Sglang | VllmMooncake) else None
        if path is not None:
            for server in (run.prefill, run.decode):
                self._in_background(self._probe.abort(server.root + path, run.attempt.rid))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _note_prefill(prefill: asyncio.Future[PrefillEnd], served: Served, hold: Hold) -> None:
    hold.prefill_ended()
    if not prefill.cancelled() and prefill.exception() is None:
        served.prefill_seconds = prefill.result().seconds


def _note_refusal(job: Job, server: Server, status: int) -> None:
    """Which of the two it was: the answer itself may not say."""
    if status >= 400:
        job.served.notices += (f"{server.name} refused the request with {status}",)


def _whole(job: Job, end: PrefillEnd) -> RawResponse:
    """The prefill server's own refusal, or its answer in the form that was asked for."""
    headers, body = dict(end.headers), end.body if end.is_refusal else prefills_own(end.body)
    if job.request.stream and not end.is_refusal:
        options = value(job.fields, "stream_options")
        include_usage = isinstance(options, dict) and options.get("include_usage") is True
        body = as_stream(body, is_chat="messages" in job.fields, include_usage=include_usage)
        headers["Content-Type"] = "text/event-stream"
    return WholeAnswer(status=end.status, headers=headers, body=body, served=job.served)
