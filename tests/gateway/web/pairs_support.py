"""A gateway with scripted prefill, decode and merged servers behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from web_support import Answer, Gateway, running

from gateway.settings.schema import PairSettings, RetrySettings, Settings
from support.pd_servers import TEXT, PdServer, World, listening
from support.waiting import until_told

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT_BODY = {"model": "m", "prompt": "hi"}
WHOLE = "".join(TEXT)
KINDS = {
    "vllm": "vllm",
    "vllm-mooncake": "mooncake",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt",
    "store": "store",
    "llm-d": "sidecar",
}
SPLIT = {"X-Cache-Mode": "split"}


@dataclass
class Pair:
    """A gateway with servers behind it."""

    gateway: Gateway
    prefill: list[PdServer]
    decode: list[PdServer]
    merged: list[PdServer]

    @property
    def p(self) -> PdServer:
        return self.prefill[0]

    @property
    def d(self) -> PdServer:
        return self.decode[0]

    async def ask(self, body: dict[str, Any] | None = None, **fields: Any) -> Answer:
        headers = {**SPLIT, **fields.pop("headers", {})}
        body = {**(CHAT if body is None else body), **fields}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await self.gateway.post(path, body, headers=headers)

    async def state(self) -> dict[str, Any]:
        return (await self.gateway.get("/ready")).json()["targets"]["pair"]

    @property
    def num_blocks(self) -> tuple[int, int]:
        return sum(s.num_blocks for s in self.prefill), sum(s.num_blocks for s in self.decode)


@asynccontextmanager
async def pair(
    engine: str = "vllm",
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_merged: int = 0,
    retry: RetrySettings | None = None,
    changed: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Servers and the gateway. `changed` sets facts of a side's servers, or of one, before anyone asks them."""
    world = World()
    async with AsyncExitStack() as stack:
        sides: dict[str, list[PdServer]] = {}
        for side, number in (("prefill", num_prefill), ("decode", num_decode), ("merged", num_merged)):
            told = [{**(changed or {}).get(side, {}), **(changed or {}).get(f"{side}-{i}", {})} for i in range(number)]
            servers = [PdServer(**{"engine": KINDS[engine], "side": side, "world": world, **facts}) for facts in told]
            sides[side] = [await stack.enter_async_context(listening(server)) for server in servers]
        urls = {side: tuple(server.url for server in servers) for side, servers in sides.items()}
        if engine == "vllm-mooncake":
            options["bootstrap_port"] = sides["prefill"][0].port
        settings = Settings(
            pairs=(PairSettings(name="pair", engine=engine, **urls, **options),),  # type: ignore[arg-type]
            retry=retry or RetrySettings(max_attempts=1),
        )
        gateway = await stack.enter_async_context(running(settings))
        yield Pair(gateway, sides["prefill"], sides["decode"], sides["merged"])


def said(answer: Answer) -> str:
    choice = answer.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


async def until_checked(it: Pair) -> list[dict[str, Any]]:
    """Who belongs to whom, once every pair was looked at; no request is needed for it."""
    state = await until_told(it.state, lambda state: all(found["checked"] for found in state["pairs"]))
    pairs: list[dict[str, Any]] = state["pairs"]
    return pairs


async def until_state(it: Pair, name: str, state: str) -> None:
    await until_told(it.state, lambda told: {s["name"]: s["state"] for s in told["servers"]}[name] == state)
