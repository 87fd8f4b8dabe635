"""A small gateway for tests: scripted answers, a clock that only the script moves, and a log of what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.bench.client import GatewayClient
from gateway.bench.options import CompareOptions
from gateway.bench.rows import Comparison
from gateway.bench.runner import Clocks, Runner
from support.progress_log import ProgressLog

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class ScriptedClock:
    """Stands still until the script moves it; lets the script wait until the client has looked at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self.num_reads += 1
        self._read.set()
        return self.now

    async def read_past(self, num_reads: int) -> None:
        while self.num_reads <= num_reads:
            self._read.clear()
            await self._read.wait()


def sse(value: object, event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {msgspec.json.encode(value).decode()}\n\n".encode()


def text_chunk(text: str, finish_reason: str | None = None) -> bytes:
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage_chunk(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = 0) -> bytes:
    details = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}
    return sse({"choices": [], "usage": usage})


@dataclass
class Script:
    """One answer: (seconds that pass, bytes then sent) in order, seconds before the end, and how it ends."""

    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    seconds_before_end: float = 0.0
    status: int = 200
    mode: str | None = "asked"  # X-Cache-Mode; "asked" = the mode of the request, None = no header
    body: object = None  # of an answer that is no stream
    hangs: bool = False
    breaks: bool = False  # the connection is cut


def whole_answer(body: Mapping[str, Any], text: str = "ab", cached_tokens: int | None = 0) -> Script:
    num_prompt = len(body["prompt"])
    chunks = [text_chunk(char) for char in text]
    chunks += [text_chunk("", "length"), usage_chunk(num_prompt, body["max_tokens"], cached_tokens), DONE]
    return Script([(0.0, chunk) for chunk in chunks])


Answers = Callable[[str, dict[str, Any]], Script]


class FakeGateway:
    """Answers by a function of mode and body. `log` holds (what, detail) in the order of arrival."""

    def __init__(self, answers: Answers | None = None, clock: ScriptedClock | None = None) -> None:
        self.answers = answers or (lambda mode, body: whole_answer(body))
        self.clock = clock or ScriptedClock()
        self.log: list[tuple[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.models: list[dict[str, Any]] = [{"id": "small", "modes": ["merged", "split"], "max_model_len": 1024}]
        self.engines: dict[str, dict[str, Any]] = {}
        self.timings: dict[str, dict[str, Any]] = {}  # by mode
        self.refused: dict[str, int] = {}  # path -> status
        self.gone_after_completions: int | None = None  # from then on every connection is cut
        self.barrier: asyncio.Barrier | None = None  # answers begin when so many requests are in flight
        self.most_in_flight = 0
        self._num_in_flight = 0
        self._modes: dict[str, str] = {}

    @property
    def clocks(self) -> Clocks:
        return Clocks(now=self.clock, cpu=lambda: self.clock.now / 2, sleep=_no_sleep)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._refuse])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/v1/engines", self._engines),
                web.get("/v1/requests/{id}", self._record),
                web.post("/v1/admin/reset_peaks", self._reset),
                web.get("/health", self._health),
            ]
        )
        return app

    def prompts(self, mode: str) -> list[Any]:
        return [body["prompt"] for what, (asked, body) in self.completions() if asked == mode]

    def completions(self) -> list[tuple[str, Any]]:
        return [entry for entry in self.log if entry[0] == "completion"]

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if len(self.completions()) == self.gone_after_completions and request.transport is not None:
            request.transport.abort()
        status = self.refused.get(request.path)
        if status is not None:
            return web.json_response(
                {"error": {"message": f"no {request.headers.get('Authorization')}"}}, status=status
            )
        response: web.StreamResponse = await handler(request)
        return response

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        mode, body = request.headers["X-Cache-Mode"], msgspec.json.decode(await request.read())
        self.log.append(("completion", (mode, body)))
        script = self.answers(mode, body)
        request_id = f"r{len(self.log)}"
        self._modes[request_id] = mode
        headers = {"X-Request-Id": request_id}
        if script.mode is not None:
            headers["X-Cache-Mode"] = mode if script.mode == "asked" else script.mode
        if script.status != 200 or script.body is not None:
            return web.json_response(script.body, status=script.status, headers=headers)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        try:
            return await self._stream(request, script, headers)
        finally:
            self._num_in_flight -= 1

    async def _stream(self, request: web.Request, script: Script, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.barrier is not None:
            await self.barrier.wait()
        for seconds, chunk in script.chunks:
            self.clock.now += seconds
            seen = self.clock.num_reads
            await response.write(chunk)
            await self.clock.read_past(seen)
        if script.hangs:
            await asyncio.Event().wait()
        if script.breaks and request.transport is not None:
            request.transport.abort()
        self.clock.now += script.seconds_before_end
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _engines(self, request: web.Request) -> web.Response:
        self.log.append(("engines", None))
        return web.json_response({"engines": self.engines, "instances": []})

    async def _record(self, request: web.Request) -> web.Response:
        timings = self.timings.get(self._modes.get(request.match_info["id"], ""))
        if timings is None:
            return web.json_response({"error": {"message": "no record"}}, status=404)
        return web.json_response({"request_id": request.match_info["id"], "timings": timings})

    async def _reset(self, request: web.Request) -> web.Response:
        self.log.append(("reset", msgspec.json.decode(await request.read())["clear_prefix_cache"]))
        return web.json_response({"reset": True})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": "9.9"})


async def _no_sleep(seconds: float) -> None:
    return None


@asynccontextmanager
async def serving(gateway: FakeGateway) -> AsyncIterator[str]:
    async with TestServer(gateway.app()) as server:
        yield str(server.make_url("")).rstrip("/")


async def run_comparison(
    gateway: FakeGateway, options: CompareOptions, *, key: str | None = None, progress: ProgressLog | None = None
) -> Comparison:
    """One whole comparison against the fake, on its clock."""
    async with serving(gateway) as url, aiohttp.ClientSession() as session:
        client = GatewayClient(session, url, key)
        return await Runner(client, options, progress or ProgressLog(), gateway.clocks).run()
