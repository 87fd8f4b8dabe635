"""What the HTTP parser refuses before any handler sees it, told as JSON like every other error.

The library answers such requests itself, in plain text; its request handler is exchanged for one that doesn't.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.web_request import BaseRequest
from typing_extensions import override

from gateway.dialects import openai_frames
from gateway.dialects.base import ErrorFacts


class _Handler(web.RequestHandler):
    __slots__ = ()

    @override
    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        plain = super().handle_error(request, status, exc, message)
        said = "Something went wrong in the gateway; its log says what." if status >= 500 else _in_one_line(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = openai_frames.error_body(ErrorFacts(plain.status, kind, said))
        response = web.Response(
            status=plain.status, body=body, content_type="application/json", headers={"Server": "kvgate"}
        )
        response.force_close()
        return response


class _Server(web.Server):
    @override
    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class JsonRunner(web.AppRunner):
    """Runs an application whose refusals of bad HTTP are JSON."""

    __slots__ = ()

    @override
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


def _in_one_line(message: str | None) -> str:
    """The parser's words, without its drawing of where in the bytes the fault is."""
    first = (message or "").strip().splitlines()
    return f"The request is not valid HTTP: {first[0].rstrip(':')}." if first else "The request is not valid HTTP."
