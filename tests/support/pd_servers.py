"""Prefill, decode and merged servers that speak the engines' protocols exactly, with KV blocks that can be counted.

A transfer that the protocol doesn't allow is refused as the engine refuses it; blocks that nobody frees stay counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TEXT = ("Hello", ", ", "world", ".")
_ids = itertools.count(1)


@dataclass
class Got:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), None)


@dataclass
class World:
    """What lies between servers: KV that waits to be fetched, and rooms in which two requests meet."""

    parked: dict[str, PdServer] = field(default_factory=dict)  # remote_request_id -> the prefill server that holds it
    rooms: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    def room(self, number: int) -> asyncio.Future[None]:
        return self.rooms.setdefault(number, asyncio.get_running_loop().create_future())


@dataclass
class PdServer:
    """One server of any kind. `fails` is asked before each request: a status to answer, "hang", "reset" or None."""

    engine: str  # vllm, mooncake, sglang, tensorrt, store, sidecar
    side: str  # prefill, decode, merged
    world: World = field(default_factory=World)
    version: str = "0.33.0"
    model: str = "m"
    page_size: int = 16
    kv_dtype: str = "auto"
    cached_tokens: int | None = 3  # as it says itself
    prompt_tokens: int = 11
    capacity: int | None = None  # requests at once; one more hangs until another leaves, as the engines do
    is_healthy: bool = True
    num_version_asked: int = 0
    fails: Callable[[Got], int | str | None] = lambda got: None
    pause: Callable[[str], asyncio.Event | None] = lambda where: None  # a place of the answer to wait at
    metrics_text: str = ""
    ranks_told: bool = True  # Mooncake: its bootstrap service is ready
    got: list[Got] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # rids
    num_gone: int = 0  # requests that were left before their answer was over
    num_blocks: int = 0  # held by requests, or for one that is to fetch them
    num_running: int = 0
    most_running: int = 0
    port: int = 0
    engine_id: str = field(default_factory=lambda: f"engine-{next(_ids)}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024**2)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        if self.engine == "sglang":
            app.router.add_get("/server_info", self._server_info)
            app.router.add_post("/abort_request", self._abort)
        else:
            app.router.add_get("/version", self._version)
        app.router.add_get("/query", self._query)
        return app

    # ---------------------------------------------------------------------------------------------------------- pages

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _version(self, _request: web.Request) -> web.Response:
        self.num_version_asked += 1
        return web.json_response({"version": self.version})

    async def _models(self, _request: web.Request) -> web.Response:
        owner = {"sglang": "sglang", "tensorrt": "tensorrt_llm"}.get(self.engine, "vllm")
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": owner, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        info = f'vllm:cache_config_info{{block_size="16",cache_dtype="{self.kv_dtype}",engine="0"}} 1.0\n'
        return web.Response(text=("" if self.engine == "sglang" else info) + self.metrics_text)

    async def _server_info(self, _request: web.Request) -> web.Response:
        info = {
            "disaggregation_mode": "null" if self.side == "merged" else self.side,
            "disaggregation_bootstrap_port": 8998 + self.port % 7,
            "page_size": self.page_size,
            "kv_cache_dtype": self.kv_dtype,
            "version": self.version,
        }
        return web.json_response(info)

    async def _query(self, _request: web.Request) -> web.Response:
        if self.engine != "mooncake":
            return web.Response(status=404)
        if not self.ranks_told:
            return web.json_response({})
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": "tcp://127.0.0.1:1"}})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborted.append(body["rid"])
        return web.Response()

    # -------------------------------------------------------------------------------------------------------- requests

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        got = Got(request.path, dict(request.headers), await request.json())
        self.got.append(got)
        failure = self.fails(got)
        is_over = False
        try:
            if failure == "hang":
                await asyncio.Event().wait()
            if failure == "reset":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.Event().wait()
            if isinstance(failure, int):
                is_over = True
                return _error(failure, f"{self.side} says {failure}")
            response = await self._answer(request, got)
            is_over = True
            return response
        finally:
            self.num_gone += not is_over
            self._let_go(got)

    def _let_go(self, got: Got) -> None:
        """vLLM's decode side tells the prefill side when it has read, and also when it won't."""
        params = got.body.get("kv_transfer_params")
        owner = self.world.parked.pop(params.get("remote_request_id"), None) if params else None
        if owner is not None:
            owner.num_blocks -= 1

    async def _answer(self, request: web.Request, got: Got) -> web.StreamResponse:
        self.num_blocks += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        keeps = False
        try:
            if self.capacity is not None and self.num_running > self.capacity:
                await asyncio.Event().wait()  # a bootstrap that never comes about
            await self._wait("start")
            check = getattr(self, f"_{self.engine}_{self.side}", self._plain)
            extra, problem = await check(got)
            if problem is not None:
                return _error(*problem)
            await self._wait("computed")
            response = await self._send(request, got, extra)
            keeps = self.side == "prefill" and "kv_transfer_params" in extra
            return response
        finally:
            self.num_running -= 1
            if not keeps:
                self.num_blocks -= 1

    async def _wait(self, where: str) -> None:
        event = self.pause(where)
        if event is not None:
            await event.wait()

    async def _plain(self, _got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        return {}, None

    async def _vllm_prefill(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        body, params = got.body, got.body.get("kv_transfer_params")
        if params is None:
            return {}, None
        if "stream_options" in body or body.get("stream") or (body.get("min_tokens") or 0) > 1:
            return {}, (400, "stream_options without stream, or min_tokens above max_tokens")
        if body.get("max_tokens") != 1 or not params["do_remote_decode"] or params["do_remote_prefill"]:
            return {}, (400, "no prefill of one token")
        remote = f"{got.header('X-Request-Id')}-{next(_ids):08d}"
        self.world.parked[remote] = self
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": remote,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "a_later_field": {"opaque": [1, None, "x"]},
        }
        return {"kv_transfer_params": told}, None

    async def _vllm_decode(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        params = got.body.get("kv_transfer_params")
        if params is None:
            return {}, None
        owner = self.world.parked.get(params["remote_request_id"])
        if (
            owner is None
            or owner.engine_id != params["remote_engine_id"]
            or params["a_later_field"]["opaque"][2] != "x"
        ):
            return {}, (500, "Got invalid KVTransferParams")
        await self._wait("transfer")
        self._let_go(got)
        return {"kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": 5700}}, None

    async def _mooncake_prefill(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        params = got.body["kv_transfer_params"]
        if got.header("X-data-parallel-rank") != "0" or not params["do_remote_decode"]:
            return {}, (400, "no rank")
        return await self._meet(hash(params["transfer_id"]))

    async def _mooncake_decode(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        params = got.body["kv_transfer_params"]
        if not params["do_remote_prefill"] or not params["remote_engine_id"].startswith("engine-"):
            return {}, (400, "no remote engine")
        return await self._meet(hash(params["transfer_id"]))

    async def _sglang_prefill(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        return await self._meet(got.body["bootstrap_room"])

    async def _sglang_decode(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        return await self._meet(got.body["bootstrap_room"])

    async def _meet(self, room: int) -> tuple[dict[str, Any], tuple[int, str] | None]:
        """Both sides of a transfer wait for one another, for ever if need be."""
        met = self.world.room(room)
        if self.side == "prefill":
            await self._wait("transfer")
            met.set_result(None)
        await asyncio.shield(met)
        return {}, None

    async def _tensorrt_prefill(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        params = got.body["disaggregated_params"]
        if params["request_type"] != "context_only" or not params["disagg_request_id"] >= 2**42 or got.body["stream"]:
            return {}, (400, "no context request")
        told = {"ctx_request_id": 5, "first_gen_tokens": [7], "encoded_opaque_state": "b3BhcXVl"}
        return {"disaggregated_params": told, "prompt_token_ids": [1, 2, 3]}, None

    async def _tensorrt_decode(self, got: Got) -> tuple[dict[str, Any], tuple[int, str] | None]:
        params = got.body["disaggregated_params"]
        ids = got.body["prompt_token_ids"] if "messages" in got.body else got.body["prompt"]
        if (
            params["request_type"] != "generation_only"
            or params["encoded_opaque_state"] != "b3BhcXVl"
            or ids != [1, 2, 3]
        ):
            return {}, (400, "no generation request")
        return {}, None

    # --------------------------------------------------------------------------------------------------------- answers

    async def _send(self, request: web.Request, got: Got, extra: dict[str, Any]) -> web.StreamResponse:
        one_token = self.side == "prefill"
        pieces = TEXT[:1] if one_token or got.body.get("max_tokens") == 1 else TEXT
        is_chat = "messages" in got.body
        if not got.body.get("stream"):
            return web.json_response(self._whole(is_chat, pieces, extra))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, piece in enumerate(pieces):
            await response.write(_chunk(is_chat, piece, None))
            await self._wait(f"piece {i}")
        await response.write(_chunk(is_chat, "", "length" if one_token else "stop", **extra))
        if (got.body.get("stream_options") or {}).get("include_usage"):
            await response.write(
                _event({**_base(is_chat, stream=True), "choices": [], "usage": self._usage(len(pieces))})
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    def _whole(self, is_chat: bool, pieces: tuple[str, ...], extra: dict[str, Any]) -> dict[str, Any]:
        text = "".join(pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if len(pieces) == 1 else "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if "disaggregated_params" in extra:
            extra = dict(extra)
            choice["disaggregated_params"] = extra.pop("disaggregated_params")
        return {**_base(is_chat, stream=False), "choices": [choice], "usage": self._usage(len(pieces)), **extra}

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        cached = self.prompt_tokens - 1 if self.side == "decode" else self.cached_tokens
        details = None if cached is None else {"cached_tokens": cached}
        total = self.prompt_tokens + num_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total}
        return {**counts, "prompt_tokens_details": details}


def _base(is_chat: bool, *, stream: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if stream else "chat.completion") if is_chat else "text_completion"
    return {"id": "c1", "object": kind, "created": 1, "model": "m"}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _chunk(is_chat: bool, text: str, finish: str | None, **extra: Any) -> bytes:
    said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **said, "finish_reason": finish}
    return _event({**_base(is_chat, stream=True), "choices": [choice], **extra})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "err", "code": status}}, status=status)


@asynccontextmanager
async def listening(server: PdServer) -> AsyncIterator[PdServer]:
    """The server on a free port, or on the one it has had before. A client's leaving cancels its request."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", server.port)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
