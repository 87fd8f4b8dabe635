"""An upstream's answer up to its headers: asked for, and raised as an error where it is one.

Whatever comes after the headers is `passthrough`'s and `translated`'s.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from gateway.core.errors import GatewayError, UpstreamError, UpstreamGone
from gateway.core.retry_after import retry_after_seconds, told_again
from gateway.core.spelling import parse_mode
from gateway.dialects import sniff
from gateway.service.exchange import Exchange
from gateway.upstreams.base import PassThroughUpstream, RawRequest, RawResponse

MAX_ERROR_BYTES = 1024**2
MAX_ANSWER_BYTES = 64 * 1024**2  # of an answer in one piece, which is kept until it is whole
_UNASKED_STREAM = "The upstream answered with a stream (text/event-stream), which the request did not ask for."


@dataclass(frozen=True, slots=True)
class PassThroughPlan:
    """A request ready to be sent, and what to do without if the upstream refuses our addition."""

    request: RawRequest
    without_usage: RawRequest | None = None  # the same without the usage we asked for on our own account
    strip_usage: bool = False  # the client didn't ask for usage
    num_choices: int = 1  # that an answer in another API's words has


async def open_response(exchange: Exchange, upstream: PassThroughUpstream, plan: PassThroughPlan) -> RawResponse:
    """The upstream's answer once its headers are there; an error answer is raised."""
    response = await _open(exchange, upstream, plan.request)
    if response.status in (400, 422) and plan.without_usage is not None:
        body = await read_whole(response)
        if b"stream_options" not in body and b"include_usage" not in body:
            raise upstream_error(response, body)
        exchange.note(("the upstream doesn't know stream_options: token counts are not known",))
        response = await _open(exchange, upstream, plan.without_usage)
    exchange.upstream_headers = told_again(response.headers, time.time())
    exchange.served_mode = _confirmed_mode(exchange.upstream_headers.pop("X-Cache-Mode", ""))
    coding = exchange.upstream_headers.pop("Content-Encoding", None)  # that couldn't be undone
    content_type = exchange.upstream_headers.pop("Content-Type", "application/json")
    await refuse_redirect(response)
    if response.status >= 400:
        exchange.note(_about_key(exchange, response.status))
        body = await read_whole(response)
        raise upstream_error(response, body if coding is None else b"", address_of(upstream, plan.request))
    if coding is not None:
        await response.close()
        raise UpstreamError(_compressed(coding), status=502, is_final=True)
    exchange.content_type = _in_small_letters(content_type)
    exchange.accept()
    return response


async def _open(exchange: Exchange, upstream: PassThroughUpstream, request: RawRequest) -> RawResponse:
    response = await upstream.open(request)
    served = getattr(response, "served", None)  # `isinstance` of a protocol would cost more than all else here
    if served is not None:
        exchange.serve(served)
    return response


async def refuse_redirect(response: RawResponse) -> None:
    if 300 <= response.status < 400:
        await response.close()
        raise UpstreamError(_redirected(response.status), status=502, is_final=True)


async def refuse_stream(response: RawResponse, content_type: str) -> None:
    """A stream that nobody asked for is no answer in one piece, and not read on: it may have no end."""
    if content_type.startswith("text/event-stream"):
        await response.close()
        raise UpstreamError(_UNASKED_STREAM, status=502, is_final=True)


def _in_small_letters(content_type: str) -> str:
    """The type as it is compared here; its parameters as they came."""
    kind, semicolon, parameters = content_type.partition(";")
    return f"{kind.strip().lower()}{semicolon}{parameters}"


def _confirmed_mode(said: str) -> str:
    """Only a mode that the upstream names itself; whatever else it writes never becomes a label."""
    try:
        return parse_mode(said).value
    except ValueError:
        return "unknown"


async def read_whole(response: RawResponse) -> bytes:
    """A short answer, such as an error, up to a limit; closes it."""
    body = bytearray()
    try:
        with suppress(GatewayError):  # half an error is still the error
            async for chunk in response.chunks():
                body += chunk
                if len(body) > MAX_ERROR_BYTES:
                    break
    finally:
        await response.close()
    return bytes(body)


async def read_answer(exchange: Exchange, response: RawResponse) -> bytes:
    """The whole of an answer in one piece. It is never asked for again once its first byte is here."""
    body = bytearray()
    async for chunk in response.chunks():
        exchange.begun = True
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise UpstreamGone(f"The upstream's answer is longer than {MAX_ANSWER_BYTES // 1024**2} MiB.")
    return bytes(body)


def address_of(upstream: PassThroughUpstream, request: RawRequest) -> str:
    """Where it was sent, if that is one place. `isinstance` of a protocol would cost more than all else here."""
    address = getattr(upstream, "address", None)
    return address(request.path) if callable(address) else ""


def upstream_error(response: RawResponse, body: bytes, address: str = "") -> UpstreamError:
    """The upstream's own error; a body that isn't JSON of the API's shape is wrapped later, not parsed.

    A 404 of a server that doesn't know the path says which path that was: its base URL may be wrong.
    """
    is_json = body.lstrip()[:1] == b"{" and sniff.sniff_whole(body).error
    text = "" if is_json else _plain(response, body)
    place = f" at {address}" if response.status == 404 and address else ""
    message = f"The upstream answered {response.status}{place}{text}."
    status = response.status if response.status <= 599 else 502
    return UpstreamError(
        message,
        status=status,
        body=body if is_json else None,
        retry_after=response.headers.get("Retry-After"),
        retry_after_seconds=retry_after_seconds(response.headers, time.time()),
        is_final=response.headers.get("X-Should-Retry", "").lower() == "false",
    )


def _about_key(exchange: Exchange, status: int) -> tuple[str, ...]:
    """A client would take it for a word on its own key."""
    if status not in (401, 403) or exchange.route is None:
        return ()
    target = exchange.route.target
    return (f"the {status} is {target}'s and not this gateway's: check the key that is sent there, and its base URL",)


def _compressed(coding: str) -> str:
    return f"The upstream's answer is compressed as {coding[:40]!a}, which can't be read here and wasn't asked for."


def _redirected(status: int) -> str:
    return (
        f"The upstream answered {status}, a redirect, which is not followed: its key would go along. "
        "Set the base URL to the address that it leads to."
    )


def _plain(response: RawResponse, body: bytes) -> str:
    if "html" in response.headers.get("Content-Type", "") or body.lstrip()[:1] == b"<":
        return " with an HTML page; check that the base URL is that of an API"
    text = " ".join(body[:500].decode("utf-8", "replace").split())
    return f": {text}" if text else " without a body"
