"""A scripted OpenAI-compatible upstream, run as a program: `python -m gateway.bench.gateways.upstream --port N`.

It answers every chat request with the same words, in one piece or in chunks, as fast as they can be written or with
a gap between them. What it sends is made once: its own work is the same whoever asks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web  # noqa: TID251 - a server of its own, in a process of its own

from gateway.bench.gateways.sizes import MODEL, WORD, Sizes

END = b"data: [DONE]\n\n"
MAX_BODY_BYTES = 64 * 1024**2
IDLE_SECONDS = 3600.0  # it never closes a connection of a gateway, which could meet a request


@dataclass(slots=True)
class Upstream:
    """What is answered, and how many are answered at this moment."""

    num_chunks: int
    gap_seconds: float = 0.0
    num_open: int = 0
    max_open: int = 0
    plain: bytes = b""
    frames: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain = json.dumps(plain_answer(self.num_chunks)).encode()
        self.frames = [frame(delta, reason) for delta, reason in deltas(self.num_chunks)]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if body.get("stream"):
                return await self._stream(request, bool((body.get("stream_options") or {}).get("include_usage")))
            return web.Response(body=self.plain, content_type="application/json")
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, wants_usage: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in self.frames:
            if self.gap_seconds:
                await asyncio.sleep(self.gap_seconds)
            await response.write(one)
        if wants_usage:
            await response.write(usage_frame(self.num_chunks))
        await response.write(END)
        return response

    async def control(self, request: web.Request) -> web.Response:
        """Set the gap and forget the highest number; answers with what it was."""
        max_open, self.max_open = self.max_open, self.num_open
        self.gap_seconds = float((await request.json())["gap_seconds"])
        return web.json_response({"max_open": max_open})


def usage_of(num_chunks: int) -> dict[str, int]:
    return {"prompt_tokens": 10, "completion_tokens": num_chunks, "total_tokens": 10 + num_chunks}


def plain_answer(num_chunks: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": WORD.decode() * num_chunks}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {**_head("chat.completion"), "choices": choices, "usage": usage_of(num_chunks)}


def deltas(num_chunks: int) -> list[tuple[dict[str, str], str | None]]:
    """The role, the words one by one, the end."""
    words: list[tuple[dict[str, str], str | None]] = [({"content": WORD.decode()}, None)] * num_chunks
    return [({"role": "assistant", "content": ""}, None), *words, ({}, "stop")]


def frame(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return _event({**_head("chat.completion.chunk"), "choices": choices})


def usage_frame(num_chunks: int) -> bytes:
    return _event({**_head("chat.completion.chunk"), "choices": [], "usage": usage_of(num_chunks)})


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-bench", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def models(_: web.Request) -> web.Response:
    """Also its word that it is ready."""
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


def build_app(upstream: Upstream) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/chat/completions", upstream.chat),
            web.get("/v1/models", models),
            web.get("/health", models),
            web.post("/control", upstream.control),
        ]
    )
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=Sizes().num_chunks)
    arguments = parser.parse_args()
    web.run_app(
        build_app(Upstream(arguments.chunks)),
        host="127.0.0.1",
        port=arguments.port,
        print=None,
        access_log=None,
        backlog=4096,
        keepalive_timeout=IDLE_SECONDS,
    )


if __name__ == "__main__":
    main()
