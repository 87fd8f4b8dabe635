"""How many tokens a prompt has, without an answer: asked of the engine, or of an upstream that knows the question."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from gateway.core.errors import GatewayError, NotFound, UpstreamError
from gateway.core.types import CacheStrategy, ChatRequest
from gateway.dialects.base import ChatForm
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.sampling import Defaults
from gateway.routing.breaker import Verdict
from gateway.routing.retry import Reason, RetryPlan, failure_of
from gateway.service.attempts import Surroundings
from gateway.service.call import Call
from gateway.service.guard import TargetGuard
from gateway.service.opening import address_of, read_whole, refuse_redirect, refuse_stream, upstream_error
from gateway.upstreams.base import EventUpstream, PassThroughUpstream, RawRequest

T = TypeVar("T")

_MAX_BYTES = 64 * 1024  # of an answer that is one number
_NO_COUNT = "The upstream answered 200 with something that is no count; is its base URL that of an API?"


@runtime_checkable
class CountsTokens(Protocol):
    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the rendered prompt. Raises like `stream` does."""


async def count_here(
    engine: EventUpstream,
    call: Call,
    strategy: CacheStrategy,
    form: ChatForm,
    defaults: Defaults,
    *,
    around: Surroundings,
) -> int:
    """Asked again like any request: an engine that is being started again is waited for."""
    if not isinstance(engine, CountsTokens):
        raise NotFound("This engine can't count tokens.")
    parsed = parse_chat(form.fields, defaults)
    request = ChatRequest(
        request_id=call.request_id,
        model="",
        prompt=parsed.prompt,
        sampling=parsed.sampling,
        strategy=strategy,
        stream=False,
    )
    main_engine = replace(strategy, kv_cache_dtype="auto")  # it counts, whatever variant would answer
    return await _asked_until_answered(
        lambda _is_blamed: engine.count_tokens(request), engine.name, around, partial(engine.back, main_engine)
    )


async def count_elsewhere(upstream: PassThroughUpstream, request: RawRequest, around: Surroundings) -> bytes:
    """In the upstream's own words. Asked again like any request, but of nobody else: others count in other tokens."""
    guard = around.guards.get(upstream.name)
    return await _asked_until_answered(
        lambda is_blamed: _guarded(upstream, request, guard, is_blamed=is_blamed), upstream.name, around
    )


async def _asked_until_answered(
    ask: Callable[[bool], Awaitable[T]],
    name: str,
    around: Surroundings,
    back: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """`ask` is told whether the target was blamed already; `back` returns when one that is starting again is there."""
    plan = RetryPlan(1, around.limits, started_at=time.monotonic(), random=around.random)
    last_sent: GatewayError | None = None
    is_blamed = False
    while True:
        try:
            return await ask(is_blamed)
        except GatewayError as error:
            failure, told = failure_of(error), last_sent or error.with_traceback(None)
            if failure.was_sent:
                last_sent = told = error.with_traceback(None)
            is_blamed = is_blamed or failure.verdict is Verdict.FAILURE
            again = plan.failed(0, failure, time.monotonic())
            if again is None:
                raise told from None
        if failure.reason is not Reason.RESTARTING or last_sent is None:  # else the death itself was counted
            around.count_retry(name, name, failure.reason.value)
        if not again.when_back:
            await asyncio.sleep(again.delay_seconds)
        elif back is None or not await _is_within(again.delay_seconds, back()):
            raise told


async def _is_within(seconds: float, awaited: Awaitable[None]) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await awaited
    except TimeoutError:
        return False
    return True


async def _guarded(
    upstream: PassThroughUpstream, request: RawRequest, guard: TargetGuard | None, *, is_blamed: bool
) -> bytes:
    """One attempt. All attempts of one request are one failure of the target."""
    ticket = await guard.enter() if guard is not None else None
    verdict, why = Verdict.NONE, ""
    try:
        body = await _count(upstream, request)
        verdict = Verdict.SUCCESS
        return body
    except GatewayError as error:
        failure = failure_of(error)
        why = failure.reason.value
        verdict = Verdict.NONE if is_blamed and failure.verdict is Verdict.FAILURE else failure.verdict
        raise
    finally:
        if guard is not None and ticket is not None:
            guard.leave(ticket, verdict, why)


async def _count(upstream: PassThroughUpstream, request: RawRequest) -> bytes:
    response = await upstream.open(request)
    await refuse_redirect(response)
    if response.status != 200:
        raise upstream_error(response, await read_whole(response), address_of(upstream, request))
    await refuse_stream(response, response.headers.get("Content-Type", ""))
    body = bytearray()
    try:
        async for chunk in response.chunks():
            body += chunk
            if len(body) > _MAX_BYTES:
                raise UpstreamError(_NO_COUNT, status=502, is_final=True)
    finally:
        await response.close()
    if not _is_object(body):
        raise UpstreamError(_NO_COUNT, status=502, is_final=True)
    return bytes(body)


def _is_object(body: bytearray) -> bool:
    try:
        return isinstance(msgspec.json.decode(body), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
