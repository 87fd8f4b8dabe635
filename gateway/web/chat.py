"""Handlers of the chat APIs: HTTP in, a call to the service, HTTP out."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from aiohttp import web

from gateway.core.errors import GatewayError, InternalError, NotFound, UpstreamTimeout
from gateway.service import BACKEND_HEADER, Body, Call, ChatService, Exchange, Outcome, headers_of
from gateway.strategy import resolve
from gateway.web.body import read_body
from gateway.web.dialects import COUNTING, dialect_for, fields_of_path
from gateway.web.errors import error_response
from gateway.web.guard import check_said_once
from gateway.web.keys import CLIENT_KEY, CLIENT_REQUEST_ID, GENERATION, REQUEST_ID, TURNS
from gateway.web.paths import Place
from gateway.web.sse import SseSender

logger = logging.getLogger(__name__)

_NOT_HERE = {
    "embeddings": "Embeddings are not served here.",
    "responses/compact": "Conversations are not compacted here: send the whole of it, or a shorter one.",
    "models/*:embedContent": "Embeddings are not served here.",
    "models/*:batchEmbedContents": "Embeddings are not served here.",
}


async def answer(request: web.Request, place: Place) -> web.StreamResponse:
    """One request of any of the chat APIs."""
    return await _answer(request, await _read_call(request, place))


async def count_tokens(request: web.Request, place: Place) -> web.Response:
    call = await _read_call(request, place)
    counting = COUNTING[place.name]
    counted = await request[GENERATION].service.count_tokens(call, counting.upstream_path, counting.form)
    body = counted if isinstance(counted, bytes) else msgspec.json.encode({counting.answer_field: counted})
    return web.Response(body=body, content_type="application/json")


async def not_here(_request: web.Request, place: Place) -> web.Response:
    """Of an API that is served, a part that isn't: clients go on without it."""
    raise NotFound(_NOT_HERE[place.name])


async def _read_call(request: web.Request, place: Place) -> Call:
    arrived_at = asyncio.get_running_loop().time()  # monotonic; before the body, which may take long to come
    await request.app[TURNS].enter()
    settings = request[GENERATION].settings
    _check_choices(request)
    data = await read_body(request, int(settings.limits.max_request_mib * 1024**2))
    return Call(
        request_id=request[REQUEST_ID],
        dialect=dialect_for(request, place),
        body=Body(data, fields_of_path(place)),
        headers=request.headers,
        query=request.query,
        path_mode=place.mode,
        key=request.get(CLIENT_KEY),
        client_request_id=request.get(CLIENT_REQUEST_ID),
        arrived_at=arrived_at,
    )


def _check_choices(request: web.Request) -> None:
    """Headers and query fields that choose who serves, and how, say one thing each."""
    for name in (resolve.HEADER, BACKEND_HEADER):
        check_said_once(name, request.headers.getall(name, ()))
    for name in resolve.QUERY_FIELDS:
        check_said_once(f"query {name}", request.query.getall(name, ()))


async def _answer(request: web.Request, call: Call) -> web.StreamResponse:
    """Every way in which an answer can end, and what is counted for it."""
    settings, service = request[GENERATION].settings, request[GENERATION].service
    exchange = service.begin(call)
    sender = SseSender(request, exchange, settings.timeouts.heartbeat_seconds)
    limit = settings.request.timeout_seconds
    deadline = asyncio.timeout(limit)
    try:
        async with deadline:
            exchange.is_out_of_time = deadline.expired
            return await _send(service, exchange, sender)
    except GatewayError as error:
        return await _fail(exchange, sender, error)
    except TimeoutError:
        if not deadline.expired():
            logger.exception("request %s failed", call.request_id)
            return await _fail(exchange, sender, InternalError("Something in the gateway took too long."))
        return await _fail(exchange, sender, UpstreamTimeout(f"The answer took longer than {limit:g} s."))
    except (ConnectionError, asyncio.CancelledError):
        exchange.outcome = Outcome.CLIENT_GONE
        raise
    except Exception:
        logger.exception("request %s failed", call.request_id)
        return await _fail(exchange, sender, InternalError("Something went wrong in the gateway; its log says what."))
    finally:
        service.end(exchange)


async def _send(service: ChatService, exchange: Exchange, sender: SseSender) -> web.StreamResponse:
    attempts = await service.prepare(exchange)
    if exchange.stream:
        await sender.send(attempts.stream())
        return sender.response
    body = await attempts.whole()
    exchange.status = 200
    headers = {**headers_of(exchange), "Content-Type": exchange.content_type}
    return web.Response(body=body, headers=headers)


async def _fail(exchange: Exchange, sender: SseSender, error: GatewayError) -> web.StreamResponse:
    exchange.fail(error)
    if sender.prepared:
        await sender.fail(error)
        return sender.response
    call = exchange.call
    response = error_response(error, call.dialect, headers_of(exchange), call.request_id)
    exchange.status = response.status
    return response
