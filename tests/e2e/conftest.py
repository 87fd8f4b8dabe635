"""Gateways for the end-to-end tests: one shared by tests that leave it as they found it, fresh ones for the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import aiohttp
import pytest

from support.gateway_process import GatewayProcess, StartGateway, running_gateway
from support.tiny_model import make_tiny_llama

CONFIG = """
[engine]
model = "{model}"
served_name = "tiny"
dtype = "fp32"
{engine}

[kv_cache]
num_kv_blocks = {num_kv_blocks}

[scheduler]
max_batched_tokens = 512
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def start_gateway(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> StartGateway:
    def start(
        *, num_kv_blocks: int = 1024, engine: str = "", extra: str = ""
    ) -> AbstractContextManager[GatewayProcess]:
        config = CONFIG.format(model=tiny_model, num_kv_blocks=num_kv_blocks, engine=engine) + extra
        return running_gateway(config, tmp_path_factory.mktemp("gateway"))

    return start


@pytest.fixture(scope="session")
def gateway(start_gateway: StartGateway) -> Iterator[GatewayProcess]:
    with start_gateway() as running:
        running.wait_ready()
        yield running


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": "Bearer sk-local"}) as client:
        yield client
