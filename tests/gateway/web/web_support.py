"""A gateway that really listens, and an upstream that plays exact bytes. Shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.app import build_app, make_runner
from gateway.settings.schema import EngineSettings, ServerSettings, Settings
from gateway.upstreams.base import EventUpstream
from support.waiting import until  # noqa: F401 - tests of this folder may take it from here

DEADLINE = 10.0


# ---------------------------------------------------------------------------------------------------- fake upstream


class Reset:
    """Script step: cut the connection with RST."""


class Close:
    """Script step: end the connection in good order."""


class Hold:
    """Script step: say nothing until the test ends or the peer leaves."""


@dataclass
class Wait:
    """Script step: go on when the event is set."""

    event: asyncio.Event


@dataclass
class Flood:
    """Script step: the same bytes again and again, until the gateway hangs up or has taken `max_bytes`."""

    data: bytes
    max_bytes: int = 2**40
    num_sent: int = 0


@dataclass
class Seen:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)


Step = bytes | Reset | Close | Hold | Wait | Flood


def http_answer(
    body: bytes, *, status: str = "200 OK", content_type: str = "application/json", extra: str = ""
) -> list[Step]:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return [head.encode() + body]


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def sse_answer(*steps: Step, extra: bytes = b"") -> list[Step]:
    """A stream that ends with the connection."""
    return [SSE_HEAD + extra + b"\r\n", *steps]


@dataclass
class FakeUpstream:
    """Answers each request by `script`, or by what it returns for the request."""

    script: Sequence[Step] | Callable[[Seen], Sequence[Step]]
    seen: list[Seen] = field(default_factory=list)
    num_gone: int = 0  # connections that the gateway closed before the script was over
    num_connections: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read_request(reader)
        if request is None:
            return False
        self.seen.append(request)
        steps = self.script(request) if callable(self.script) else self.script
        for step in steps:
            if not await self._play(step, reader, writer):
                return False
        first = steps[0] if steps else b""
        return isinstance(first, bytes) and b"Connection: close" not in first

    async def _play(self, step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
            await asyncio.sleep(0)
            return True
        if isinstance(step, Wait):
            await step.event.wait()
            return True
        if isinstance(step, Close):
            return False
        if isinstance(step, Flood):
            return await self._flood(step, writer)
        if isinstance(step, Reset):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        await reader.read(1)  # Hold: until the gateway hangs up
        self.num_gone += 1
        return False

    async def _flood(self, step: Flood, writer: asyncio.StreamWriter) -> bool:
        try:
            while step.num_sent < step.max_bytes:
                writer.write(step.data)
                await writer.drain()
                step.num_sent += len(step.data)
        except ConnectionError:
            self.num_gone += 1
            return False
        return True


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    if not head:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    headers = [tuple(line.split(": ", 1)) for line in lines[1:] if ": " in line]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Seen(method, path, headers, await reader.readexactly(length))  # type: ignore[arg-type]


@asynccontextmanager
async def fake_upstream(script: Any) -> AsyncIterator[FakeUpstream]:
    fake = FakeUpstream(script)
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()


# ---------------------------------------------------------------------------------------------------------- gateway


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def data(self) -> list[bytes]:
        """Payload of every data line, by the letter of the specification."""
        out = []
        for event in self.body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
            values = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if values:
                out.append(b"\n".join(values))
        return out

    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data() if data != b"[DONE]"]

    def text(self) -> str:
        found = []
        for chunk in self.chunks():
            for choice in chunk.get("choices", ()):
                found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(found)

    def finish_reasons(self) -> list[str]:
        return [c["finish_reason"] for k in self.chunks() for c in k.get("choices", ()) if c.get("finish_reason")]

    @property
    def done(self) -> bool:
        return b"[DONE]" in self.data()


@dataclass
class Gateway:
    """A running gateway and a client for it."""

    app: Any
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        data: Any = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        data = io.BytesIO(data) if data and len(data) > 2**20 else data  # aiohttp warns of large bytes
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.session.request(
            method, self.url + path, data=data, headers=headers, allow_redirects=False, **options
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.call("POST", path, body, **options)

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.call("GET", path, **options)

    async def chat(self, **fields: Any) -> Answer:
        headers = fields.pop("headers", {})
        path = fields.pop("path", "/v1/chat/completions")
        return await self.post(path, {"messages": [{"role": "user", "content": "hi"}], **fields}, headers=headers)

    async def raw(self, data: bytes) -> bytes:
        """Exact bytes in, everything that comes back until the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            async with asyncio.timeout(DEADLINE):
                return await reader.read()
        finally:
            writer.close()

    async def record(self, answer: Answer) -> dict[str, Any]:
        """What the gateway keeps of the request that had this answer."""
        kept: dict[str, Any] = (await self.get(f"/v1/requests/{answer.headers['X-Request-Id']}")).json()
        return kept

    async def health(self, target: str) -> dict[str, Any]:
        """What `/ready` says of a target."""
        told: dict[str, Any] = (await self.get("/ready")).json()["targets"][target]
        return told

    @property
    def records(self) -> Any:
        from gateway.web.keys import RECORDS

        return self.app[RECORDS]

    async def metric(self, name: str, **labels: str) -> float | None:
        registry = self.app[_metrics_key()].registry
        return registry.get_sample_value(name, labels)


def _metrics_key() -> Any:
    from gateway.web.keys import METRICS

    return METRICS


def local_settings(**parts: Any) -> Settings:
    return Settings(engine=EngineSettings(served_name="scripted"), **parts)


def upstream_settings(url: str, *, server: dict[str, Any] | None = None, **parts: Any) -> Settings:
    return Settings(server=ServerSettings(api_base=url, **(server or {})), **parts)


@asynccontextmanager
async def running(settings: Settings, engine: EventUpstream | None = None, **parts: Any) -> AsyncIterator[Gateway]:
    """The gateway as `serve` runs it, on a free port."""
    app = build_app(settings, engine=engine, **parts)
    runner = make_runner(app, shutdown_timeout=0.1)
    await runner.setup()
    from aiohttp import web

    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as session:
            yield Gateway(app, port, session)
    finally:
        await runner.cleanup()


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "up"}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({**base, "choices": [choice], **more}, ensure_ascii=False).encode() + b"\n\n"


ROLE = b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = (
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
