"""The servers, once for all tests here, and a gateway before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
import pytest
from vllm_servers import VllmServer, environment, free_port

from backends.models.store import find_ready
from gateway.bench.engines.launch import plain_view
from support.gateway_process import GatewayProcess, running_gateway, wait_until

CONFIG = """
[cache_layout]
mode = "split"

[[pairs]]
name = "vllm"
engine = "vllm"
prefill = ["{prefill}"]
decode = ["{decode}"]
merged = ["{merged}"]
queue_timeout_seconds = 120  # two cores that are shared with everything else
prefill_timeout_seconds = 120
handoff_timeout_seconds = 60
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """These run only when they are asked for: `make test-vllm`, or `-m vllm`."""
    if "vllm" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("vllm") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@dataclass
class Servers:
    prefill: VllmServer
    decode: VllmServer
    merged: VllmServer

    @property
    def all(self) -> list[VllmServer]:
        return [self.prefill, self.decode, self.merged]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = environment()
    if folder is None:
        pytest.skip("vLLM is not installed: kvgate bench --install vllm, or KVGATE_BENCH_VLLM=FOLDER")
    work = tmp_path_factory.mktemp("vllm")
    model = plain_view(find_ready("smollm2"), work / "model")
    found = Servers(
        VllmServer(folder, model, work / "prefill.log", core=0, side_channel=free_port()),
        VllmServer(folder, model, work / "decode.log", core=1, side_channel=free_port()),
        VllmServer(folder, model, work / "merged.log", core=1),
    )
    try:
        for server in found.all:
            server.start()
        for server in found.all:
            server.wait_ready()
        yield found
    finally:
        for server in found.all:
            server.stop()


@pytest.fixture(scope="session")
def gateway(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    urls = {"prefill": servers.prefill.url, "decode": servers.decode.url, "merged": servers.merged.url}
    with running_gateway(CONFIG.format(**urls), tmp_path_factory.mktemp("gateway")) as running:
        wait_until(lambda: running.get("/ready")["targets"]["vllm"]["reachable"], "the gateway has seen the servers")
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout, connector = aiohttp.ClientTimeout(total=200), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        yield client
