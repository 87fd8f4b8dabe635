"""Sends the two halves of one split request, one after the other or both at once. The first failure cancels the other.

What is sent and in which order is a plan's (`pd_plans`); which servers, is the caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from gateway.core.errors import GatewayError, InvalidRequest, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from gateway.core.retry_after import retry_after_seconds
from gateway.upstreams.base import RawRequest, RawResponse
from gateway.upstreams.pd.bodies import Fields, Leg, split_fields
from gateway.upstreams.pd.plans import Attempt, ConcurrentPlan, SequentialPlan
from gateway.upstreams.pd.server import Server

_MAX_ANSWER = 64 * 1024 * 1024  # in one piece
_PASSING = (502, 503, 504)  # asking again may help
_SHOWN = 300  # characters of a server's own words


class LegFailed(Exception):
    """One of the two servers failed, before the client got anything.

    If it `was_asked` nothing of the request, another one may be asked instead. `is_shared`: the server at the other end
    of the transfer may be at fault just as well.
    """

    def __init__(self, server: Server, error: GatewayError, *, was_asked: bool = True, is_shared: bool = False) -> None:
        super().__init__(error.message)
        self.server = server
        self.error = error
        self.was_asked = was_asked and not self.took_no_connection
        self.is_shared = is_shared and isinstance(error, UpstreamError | UpstreamTimeout)

    def shared(self) -> LegFailed:
        """The same, at a time at which the other server hasn't done its part."""
        return LegFailed(self.server, self.error, was_asked=self.was_asked, is_shared=True)

    @property
    def took_no_connection(self) -> bool:
        return isinstance(self.error, UpstreamUnreachable)


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """A prefill server's answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def is_refusal(self) -> bool:
        return self.status >= 300


@dataclass(frozen=True, slots=True)
class Run:
    """One attempt at one pair: what a plan and the edge need."""

    request: RawRequest
    fields: Fields
    attempt: Attempt
    prefill: Server
    decode: Server
    prefill_seconds: float  # limits
    handoff_seconds: float


@dataclass(frozen=True, slots=True)
class Opened:
    """The decode server's answer, and the prefill that goes on beside it or has ended."""

    response: RawResponse | None  # None: the prefill's answer is the whole one
    prefill: asyncio.Future[PrefillEnd]
    asked_at: float = 0.0  # when the decode server was


async def run_sequential(plan: SequentialPlan, run: Run) -> Opened:
    """The decode server is asked only when the prefill server has said where its KV is."""
    end = await run_prefill(run, plan.prefill(run.fields, run.attempt))
    ended: asyncio.Future[PrefillEnd] = asyncio.get_running_loop().create_future()
    ended.set_result(end)
    if end.is_refusal:
        return Opened(None, ended)
    leg = _decode_leg(plan, run, end)
    if leg is None:
        return Opened(None, ended)
    asked_at = time.monotonic()
    try:
        async with asyncio.timeout(run.handoff_seconds if leg.stream else None):
            return Opened(await open_decode(run, leg), ended, asked_at)
    except TimeoutError:
        raise LegFailed(run.decode, _handoff_timeout(run), is_shared=True) from None


def _decode_leg(plan: SequentialPlan, run: Run, end: PrefillEnd) -> Leg | None:
    try:
        return plan.decode(run.fields, run.attempt, split_fields(end.body))
    except UpstreamError as error:
        raise LegFailed(run.prefill, error) from None
    except (msgspec.MsgspecError, RecursionError, InvalidRequest):
        unreadable = UpstreamError(
            "The prefill server answered 200 with something that can't be read as JSON.", status=502
        )
        raise LegFailed(run.prefill, unreadable) from None


async def run_concurrent(plan: ConcurrentPlan, run: Run) -> Opened:
    """Both servers get the request at once; the prefill goes on while the decode server's answer is read."""
    asked_at = time.monotonic()
    prefill = asyncio.ensure_future(run_prefill(run, plan.prefill(run.fields, run.attempt)))
    decode = asyncio.ensure_future(open_decode(run, plan.decode(run.fields, run.attempt)))
    try:
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done():
            if prefill.result().is_refusal:
                await _cancel(decode)
                return Opened(None, prefill)
            await asyncio.wait({decode}, timeout=run.handoff_seconds if run.request.stream else None)
        if not decode.done():
            raise LegFailed(run.decode, _handoff_timeout(run), is_shared=True)
        return Opened(_decode_result(prefill, decode), prefill, asked_at)
    except BaseException as error:
        is_alone = isinstance(error, LegFailed) and not _went_well(decode if error.server is run.prefill else prefill)
        await _cancel(prefill)
        await _cancel(decode)
        if isinstance(error, LegFailed) and is_alone:
            raise error.shared() from None
        raise


def _decode_result(prefill: asyncio.Future[PrefillEnd], decode: asyncio.Future[RawResponse]) -> RawResponse:
    """Where both have failed, the prefill is told of: the decode server would have waited for it."""
    if decode.exception() is not None and prefill.done():
        prefill.result()
    return decode.result()


def _went_well(leg: asyncio.Future[PrefillEnd] | asyncio.Future[RawResponse]) -> bool:
    return leg.done() and not leg.cancelled() and leg.exception() is None


async def _cancel(task: asyncio.Future[PrefillEnd] | asyncio.Future[RawResponse]) -> None:
    """End it, and close what it may have opened in this very moment."""
    task.cancel()
    with suppress(asyncio.CancelledError, LegFailed):
        found = await task
        if not isinstance(found, PrefillEnd):
            await found.close()


async def run_prefill(run: Run, leg: Leg) -> PrefillEnd:
    started = time.monotonic()
    try:
        async with asyncio.timeout(run.prefill_seconds):
            response = await _send(run, run.prefill, leg)
            try:
                body = await read_whole(response.chunks())
            finally:
                await response.close()
    except TimeoutError:
        message = f"{run.prefill.name} had not finished the prefill after {run.prefill_seconds:g} s."
        raise LegFailed(run.prefill, UpstreamTimeout(message)) from None
    except GatewayError as error:
        raise LegFailed(run.prefill, error) from None
    if response.status >= 500:
        raise LegFailed(run.prefill, server_error(run.prefill, response, body))
    return PrefillEnd(response.status, response.headers, body, time.monotonic() - started)


async def open_decode(run: Run, leg: Leg) -> RawResponse:
    """The decode server's answer once its headers are there."""
    try:
        response = await _send(run, run.decode, leg)
        if response.status < 500:
            return response
        try:
            body = await read_whole(response.chunks())
        finally:
            await response.close()
    except GatewayError as error:
        raise LegFailed(run.decode, error) from None
    is_shared = response.status not in _PASSING  # so vLLM tells that it could not load the prefill's KV
    raise LegFailed(run.decode, server_error(run.decode, response, body), is_shared=is_shared)


async def _send(run: Run, server: Server, leg: Leg) -> RawResponse:
    headers = {**run.request.headers, "X-Request-Id": run.attempt.request_id}
    request = replace(
        run.request, body=leg.body(), headers=headers, stream=leg.stream, own_headers=dict(leg.own_headers)
    )
    return await server.client.open(request)


async def read_whole(chunks: AsyncIterator[bytes]) -> bytes:
    """An answer in one piece, which is kept until it is whole."""
    found = bytearray()
    async for chunk in chunks:
        found += chunk
        if len(found) > _MAX_ANSWER:
            raise UpstreamError("The server's answer is far too long.", status=502)
    return bytes(found)


def server_error(server: Server, response: RawResponse, body: bytes) -> UpstreamError:
    said = " ".join(body[: 4 * _SHOWN].decode("utf-8", "replace").split())[:_SHOWN]
    return UpstreamError(
        f"{server.name} answered {response.status}{f': {said}' if said else ' without a body'}",
        status=503 if response.status == 503 else 502,
        is_final=response.status not in _PASSING,
        retry_after=response.headers.get("Retry-After"),
        retry_after_seconds=retry_after_seconds(response.headers, time.time()),
    )


def _handoff_timeout(run: Run) -> UpstreamTimeout:
    return UpstreamTimeout(
        f"{run.decode.name} gave no output within {run.handoff_seconds:g} s after {run.prefill.name} had finished."
    )
