"""One attempt at chosen servers: the plan's legs are sent, and what comes back becomes an answer to read."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.core.errors import GatewayError, UpstreamError
from gateway.core.types import CacheMode, Side
from gateway.settings.schema import PairSettings
from gateway.upstreams.base import RawRequest, RawResponse, Served
from gateway.upstreams.pd.answer import as_stream, prefills_own
from gateway.upstreams.pd.bodies import Fields, value
from gateway.upstreams.pd.job import Hold, Job
from gateway.upstreams.pd.judging import Judge
from gateway.upstreams.pd.legs import (
    LegFailed,
    Opened,
    PrefillEnd,
    Run,
    read_whole,
    run_concurrent,
    run_sequential,
    server_error,
)
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
from gateway.upstreams.pd.server import Server

OnFailure = Callable[[Side], None]


class Runner:
    """Knows the engine's protocol. `close` waits for aborts that are still on their way."""

    def __init__(self, settings: PairSettings, probe: Probe, judge: Judge, on_failure: OnFailure) -> None:
        self.plan = PLANS[settings.engine]()
        self._settings = settings
        self._probe = probe
        self._judge = judge
        self._on_failure = on_failure
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._background)

    def needs_no_decode(self, fields: Fields) -> bool:
        """The prefill server alone answers it."""
        return isinstance(self.plan, VllmPull | Store | TensorRT) and self.plan.needs_no_decode(fields)

    async def plain(
        self, job: Job, server: Server, mode: CacheMode, hold: Hold, *, has_others: bool = False
    ) -> RawResponse:
        """One server answers alone. With `has_others` its error is raised, so that one of these may be asked again."""
        response = await self._plain(job, server, job.plain_request(), mode, hold)
        if response.status < 500 or not has_others:
            return response
        try:
            body = await read_whole(response.chunks())
        finally:
            await response.close()
        raise LegFailed(server, server_error(server, response, body))

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
        is_shared = hold.prefilling is not None
        try:
            response = await server.client.open(request)
        except GatewayError as error:
            raise LegFailed(server, error, is_shared=is_shared) from None

        def failed(error: GatewayError) -> None:
            self._judge.failed(LegFailed(server, error, is_shared=is_shared), job, hold)

        def closed(is_complete: bool) -> None:
            if is_complete and response.status < 400:
                self._judge.worked(hold)
            hold.release()

        if response.status >= 500:
            failed(server_error(server, response, b""))
        else:
            self._judge.answered(response.status, server.name, job, hold)
        return PlainAnswer(
            response, job.served, mode, on_first=hold.decoding.first_token, on_failure=failed, on_close=closed
        )

    def _answer(self, job: Job, run: Run, opened: Opened, hold: Hold) -> RawResponse:
        opened.prefill.add_done_callback(lambda ended: _note_prefill(ended, job.served, hold))
        if opened.prefill.done():
            _note_prefill(opened.prefill, job.served, hold)  # the callback comes only later
        if opened.response is None:
            end = opened.prefill.result()
            self._judge.answered(end.status, run.prefill.name, job, hold)
            hold.release()
            job.served.instance = run.prefill.name  # it alone has answered
            _note_refusal(job, run.prefill, end.status)
            return _whole(job, end)
        status = opened.response.status
        _note_refusal(job, run.decode, status)
        self._judge.answered(status, run.decode.name, job, hold)

        def failed(side: Side, error: GatewayError, is_shared: bool) -> None:
            if not isinstance(error, UpstreamError) or error.status >= 500:
                self._on_failure(side)
            server = run.prefill if side == "prefill" else run.decode
            self._judge.failed(LegFailed(server, error, is_shared=is_shared), job, hold)

        def closed(is_complete: bool, both_ended: bool) -> None:
            _note_late_failure(opened.prefill, hold)
            if is_complete and status < 400:
                self._judge.worked(hold)
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
            on_flow=hold.transferred,
            on_failure=failed,
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
    if prefill.cancelled() or prefill.exception() is not None:
        return
    end = prefill.result()
    served.prefill_seconds = end.seconds
    if hold.prefilling is not None and not end.is_refusal:
        hold.prefilling.part_done()


def _note_late_failure(prefill: asyncio.Future[PrefillEnd], hold: Hold) -> None:
    """A prefill that failed without harm: the decode server had what it needed."""
    failure = prefill.exception() if prefill.done() and not prefill.cancelled() else None
    if isinstance(failure, LegFailed) and hold.prefilling is not None:
        hold.prefilling.ended(failure.error)


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
