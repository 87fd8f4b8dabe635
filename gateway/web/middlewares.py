"""Around every handler: an id for the request, errors as JSON. Knows no endpoint."""

from __future__ import annotations

import logging
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.core.errors import BodyTooLarge, GatewayError, InternalError, InvalidRequest, MethodNotAllowed, NotFound
from gateway.web.dialects import dialect_of
from gateway.web.errors import error_response
from gateway.web.keys import CLIENT_REQUEST_ID, REQUEST_ID

logger = logging.getLogger(__name__)
_MAX_CLIENT_ID = 128


def sanitised(client_id: str) -> str:
    """A client's own request id, safe to log and to send back. Never used as a key."""
    return "".join(char for char in client_id if " " <= char <= "~").strip()[:_MAX_CLIENT_ID]


@web.middleware
async def request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[REQUEST_ID] = uuid.uuid4().hex
    client_id = sanitised(request.headers.get("X-Request-Id", ""))
    if client_id:
        request[CLIENT_REQUEST_ID] = client_id
    return await handler(request)


async def add_ids(request: web.Request, response: web.StreamResponse) -> None:
    """Signal: runs just before any answer's headers go out, streams included."""
    response.headers["Server"] = "kvgate"
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if CLIENT_REQUEST_ID in request:
        response.headers["X-Client-Request-Id"] = request[CLIENT_REQUEST_ID]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except GatewayError as error:
        return _told(request, error)
    except web.HTTPException as error:
        return _told(request, _translated(error, request.path))
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        logger.exception("request %s failed", request[REQUEST_ID])
        return _told(request, InternalError("Something went wrong in the gateway; its log says what."))


def _told(request: web.Request, error: GatewayError) -> web.Response:
    return error_response(error, dialect_of(request), request_id=request[REQUEST_ID])


def _translated(error: web.HTTPException, path: str) -> GatewayError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"Method {error.method} is not allowed here.", allowed=sorted(error.allowed_methods))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The body is too large.")
    if error.status == 404:
        return NotFound(f"There is nothing at {path[:200]!r}.")
    return InvalidRequest(error.reason)
