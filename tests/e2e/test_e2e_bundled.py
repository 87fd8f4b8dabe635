"""The bundled model through the whole stack, in fp32: what transformers generates, whichever layout serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from backends.models.store import resolve_model
from support.gateway_process import GatewayProcess, running_gateway
from support.sse import read_stream

CONFIG = """
[engine]
model = "smollm2"
dtype = "fp32"
[kv_cache]
prefill_chunk_tokens = 37  # chunks end anywhere in a block
num_kv_blocks = 512
"""
NUM_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "A KV cache holds the keys and values of every token that a model has read.",
    "def fibonacci(n):\n    " * 12,
    "Once upon a time there was a computer that liked to count: one, two, three. " * 10,
]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What `transformers.generate` says to each prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            **ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=NUM_TOKENS, eos_token_id=-1, pad_token_id=0
        )
        answers.append(tokenizer.decode(output[0, ids.input_ids.shape[1] :]))
    return answers


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder: Path = tmp_path_factory.mktemp("bundled")
    with running_gateway(CONFIG, folder) as gateway:
        gateway.wait_ready()
        yield gateway


STRATEGIES = {
    "merged": {"mode": "merged"},
    "merged in chunks of 64": {"mode": "merged", "chunkSize": 64},
    "merged without the prefix cache": {"mode": "merged", "enablePrefixCache": False},
    "split by layer": {"mode": "split", "kvTransferProtocol": "layer-wise"},
    "split by request": {"mode": "split", "kvTransferProtocol": "request-wise", "enablePrefixCache": False},
}


async def complete(session: aiohttp.ClientSession, gateway: GatewayProcess, prompt: str, strategy: object) -> str:
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True, "cacheStrategy": strategy,
    }  # fmt: skip
    answer = await read_stream(session, gateway.url + "/v1/completions", body)
    assert answer.done, answer
    return answer.text


@pytest.mark.parametrize("name", STRATEGIES)
async def test_alone_and_in_a_batch_the_text_is_that_of_transformers(
    session: aiohttp.ClientSession, bundled: GatewayProcess, expected: list[str], name: str
):
    strategy = STRATEGIES[name]
    alone = [await complete(session, bundled, prompt, strategy) for prompt in PROMPTS]
    together = await asyncio.gather(*(complete(session, bundled, prompt, strategy) for prompt in PROMPTS))

    assert alone == expected
    assert together == expected
