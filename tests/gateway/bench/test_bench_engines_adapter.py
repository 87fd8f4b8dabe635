"""The server around llama.cpp's library, with a scripted library in its place: what a client of it sees."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import pytest

from gateway.bench.engines.launch import ADAPTER
from gateway.bench.engines.runs import served_model
from gateway.bench.engines.samples import CompletionClient
from gateway.bench.probing import answers
from gateway.bench.process import free_port, running

LIBRARY = """
class Llama:
    def __init__(self, file, *, n_ctx, n_threads, n_threads_batch, n_batch, verbose):
        assert (file, n_ctx, n_threads, n_threads_batch) == ("m.gguf", 64, 2, 2)

    def generate(self, prompt, *, temp, top_k, repeat_penalty):
        assert (temp, top_k, repeat_penalty) == (0.0, 1, 1.0)
        while True:
            yield len(prompt)

    def detokenize(self, tokens, special):
        return bytes([255]) if tokens == [3] else b"ab"
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "llama_cpp.py").write_text(LIBRARY)
    return [sys.executable, str(ADAPTER), "m.gguf", "--max-model-len", "64", "--threads", "2", "--port"]


async def test_token_ids_are_answered_by_exactly_as_many_tokens_one_request_at_a_time(tmp_path, command):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {"PYTHONPATH": str(tmp_path)}
    async with aiohttp.ClientSession() as session, running([*command, str(port)], environ, tmp_path / "log") as server:
        await server.wait_ready(lambda: answers(session, f"{url}/health"), 20)
        client = CompletionClient(session, url, await served_model(session, url), asyncio.get_running_loop().time)
        samples = await asyncio.gather(client.complete([5, 6], 4), client.complete([5, 6, 7], 2))

    assert [(sample.prompt_tokens, sample.output_tokens) for sample in samples] == [(2, 4), (3, 2)]
    assert [len(sample.text_at) for sample in samples] == [4, 2]  # a byte that is no text alone counts too
