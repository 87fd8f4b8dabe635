"""A gateway that answers what a test tells it to, in all four APIs, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

HEALTH = {"status": "ok", "name": "kvgate", "version": "1.2.3"}
READY = {
    "ready": True,
    "default_mode": "merged",
    "modes": {"merged": "one instance", "split": "a pair"},
    "targets": {"local": {"kind": "engine", "instances": [{"name": "merged", "state": "ready"}], "pairs": []}},
    "notices": [],
}
MODELS = [{"id": "smollm2", "max_model_len": 32768}, {"id": "smollm2:split", "max_model_len": 32768}]


def sse(data: Any, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def chat_frames() -> list[bytes]:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return [
        b": keep-alive\n\n",
        sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "pong"}}]}),
        sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        sse({"choices": [], "usage": usage}),
        b': kvgate {"request_id": "x"}\n\n',
        sse("[DONE]"),
    ]


def messages_frames() -> list[bytes]:
    message = {"id": "m", "usage": {"input_tokens": 1, "output_tokens": 0}}
    return [
        sse({"type": "message_start", "message": message}, "message_start"),
        sse({"type": "ping"}, "ping"),
        sse({"type": "message_stop"}, "message_stop"),
    ]


def responses_frames() -> list[bytes]:
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    return [
        sse({"type": "response.created", "response": {"id": "r"}}, "response.created"),
        sse({"type": "response.completed", "response": {"id": "r", "usage": usage}}, "response.completed"),
    ]


def gemini_frames() -> list[bytes]:
    candidate = {"content": {"parts": [{"text": "pong"}]}, "finishReason": "STOP"}
    return [sse({"candidates": [candidate], "usageMetadata": {"totalTokenCount": 2}})]


FRAMES = {
    "completions": chat_frames,
    "messages": messages_frames,
    "responses": responses_frames,
    "streamGenerateContent": gemini_frames,
}


@dataclass
class Seen:
    method: str
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    num_bytes: int


@dataclass
class FakeGateway:
    """Everything is as it should be, unless a test sets it otherwise."""

    url: str = ""
    key: str | None = None
    health: Any = field(default_factory=lambda: dict(HEALTH))
    ready: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(READY)))
    models: list[dict[str, Any]] = field(default_factory=lambda: list(MODELS))
    engines: dict[str, Any] = field(default_factory=dict)
    frames: list[bytes] | None = None  # in place of the API's own
    refusal: tuple[int, dict[str, Any]] | None = None
    max_bytes: int | None = None  # a longer body is answered as beyond the context
    served_mode: str | None = None
    source: str | None = None
    notice: str = ""
    loses_mode_header: bool = False
    is_stream: bool = True
    never_ends: bool = False
    seen: list[Seen] = field(default_factory=list)

    def turns(self) -> list[Seen]:
        return [one for one in self.seen if one.method == "POST"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else {}
        self.seen.append(Seen(request.method, request.path_qs, request.headers, body, len(data)))
        if self.key is not None and request.path not in {"/", "/health"} and not self._has_key(request):
            return web.json_response({"error": {"message": "The API key is wrong.", "code": None}}, status=401)
        if request.method in {"GET", "HEAD"}:
            return self._look(request.path)
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0], headers={"Retry-After": "7"})
        if self.max_bytes is not None and len(data) > self.max_bytes:
            error = {"message": "maximum context length is 10 tokens", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        return await self._stream(request)

    def _has_key(self, request: web.Request) -> bool:
        given = [request.headers.get(name, "") for name in ("Authorization", "x-api-key", "x-goog-api-key")]
        return self.key in [one.removeprefix("Bearer ") for one in given]

    def _look(self, path: str) -> web.Response:
        answers = {
            "health": self.health,
            "ready": self.ready,
            "models": {"object": "list", "data": self.models, "models": self.models},
            "engines": {"engines": self.engines},
        }
        return web.json_response(answers.get(path.rpartition("/")[2], self.health))

    def _mode(self, request: web.Request) -> tuple[str, str]:
        header = None if self.loses_mode_header else request.headers.get("X-Cache-Mode")
        first = request.path.split("/")[1]
        path = first if first in {"merged", "split"} else None
        mode, source = (header, "header") if header else (path, "path") if path else ("merged", "default")
        return self.served_mode or mode or "", self.source or source

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        mode, source = self._mode(request)
        headers = {"X-Cache-Mode": mode, "X-Cache-Mode-Source": source, "X-Cache-Mode-Reason": "a test"}
        if self.notice:
            headers["X-Kvgate-Notice"] = self.notice
        if not self.is_stream:
            return web.json_response({"choices": []}, headers=headers)
        name = request.path.rpartition("/")[2].rpartition(":")[2]
        frames = FRAMES[name]() if self.frames is None else self.frames
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
        if self.never_ends:
            await asyncio.Event().wait()
        await response.write_eof()
        return response


@asynccontextmanager
async def running(gateway: FakeGateway) -> AsyncIterator[FakeGateway]:
    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await runner.cleanup()
