"""A scripted OpenAI-compatible upstream that plays one tool round trip: it asks for a file, then says what is in it.

It knows the tools by which each client reads a file, and answers anything that has no such tool with plain text. What
it was asked is kept, for tests. Speaks chat completions alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

SECRET = re.compile(r"MARIGOLD-\d+")
CALL_ID = "call_read_1"

Arguments = Callable[[str], dict[str, Any]]

# How to read a file by the tools of Cline, Claude Code, OpenCode and Codex, in that order of trying.
READERS: dict[str, Arguments] = {
    "read_files": lambda path: {"files": [{"path": path}]},
    "read_file": lambda path: {"path": path},
    "Read": lambda path: {"file_path": path},
    "read": lambda path: {"filePath": path},
    "exec_command": lambda path: {"cmd": f"cat {path}"},
    "shell": lambda path: {"command": ["cat", path]},
    "shell_command": lambda path: {"command": f"cat {path}"},
    "bash": lambda path: {"command": f"cat {path}", "description": "Read the file"},
}


@dataclass
class ToolUpstream:
    """`path` is the file it asks for. `url` is its base URL while it runs."""

    path: str
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    modes: list[str | None] = field(default_factory=list)  # X-Cache-Mode of each request

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.modes.append(request.headers.get("X-Cache-Mode"))
        deltas, reason = self._answer(body)
        if not body.get("stream"):
            return web.json_response(_whole(deltas, reason))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in deltas:
            await response.write(_frame(choices=[{"index": 0, "delta": delta, "finish_reason": None}]))
        await response.write(_frame(choices=[{"index": 0, "delta": {}, "finish_reason": reason}]))
        await response.write(_frame(choices=[], usage=USAGE))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        found = SECRET.findall(json.dumps([m for m in body["messages"] if m.get("role") == "tool"]))
        if found:
            return [{"role": "assistant", "content": "The file says "}, {"content": f"{found[-1]}."}], "stop"
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        name = next((name for name in READERS if name in names), None)
        if name is None:
            return [{"role": "assistant", "content": "pong"}], "stop"
        arguments = json.dumps(READERS[name](self.path))
        opening = {"index": 0, "id": CALL_ID, "type": "function", "function": {"name": name, "arguments": ""}}
        halves = (arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :])
        rest = [{"tool_calls": [{"index": 0, "function": {"arguments": half}}]} for half in halves]
        return [{"role": "assistant", "content": None, "tool_calls": [opening]}, *rest], "tool_calls"


USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def _frame(**fields: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted", **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _whole(deltas: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)}
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if calls:
        arguments = "".join(call["function"]["arguments"] for call in calls)
        message["content"] = None
        message["tool_calls"] = [{**calls[0], "function": {**calls[0]["function"], "arguments": arguments}}]
    choice = {"index": 0, "message": message, "finish_reason": reason}
    envelope = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "scripted", "usage": USAGE}
    return {**envelope, "choices": [choice]}


@asynccontextmanager
async def running_upstream(path: str) -> AsyncIterator[ToolUpstream]:
    upstream = ToolUpstream(path)
    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_post("/v1/chat/completions", upstream.chat)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream.url = f"{site.name}/v1"
    host, port = runner.addresses[0][:2]
    upstream.url = f"http://{host}:{port}/v1"
    try:
        yield upstream
    finally:
        await runner.cleanup()


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
