"""Each real client gets a plain answer from the bundled model in each cache mode, its large first request included."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from google import genai

from clients.programs import PROGRAMS, connect, program, run_program
from support.gateway_process import GatewayProcess, running_gateway

MODEL = "smollm2"
KEY = "sk-local"
PROMPT = "yes or no?"
MODES = ("merged", "split")
SETTINGS = """
[engine]
model = "smollm2"
max_model_len = 32768

[request]
max_tokens = 64
temperature = 0
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(SETTINGS, tmp_path_factory.mktemp("gateway")) as running:
        running.wait_ready()
        yield running


def newest_record(gateway: GatewayProcess) -> dict[str, Any]:
    record: dict[str, Any] = gateway.get("/v1/requests?limit=1")["requests"][0]
    return record


def assert_served(gateway: GatewayProcess, mode: str, dialect: str) -> None:
    record = newest_record(gateway)
    assert (record["dialect"], record["cache_mode"], record["outcome"]) == (dialect, mode, "ok")
    assert record["timings"]["completion_tokens"] > 0


DIALECTS = {
    "cline": "openai_chat",
    "opencode": "openai_chat",
    "claude": "anthropic_messages",
    "codex": "openai_responses",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
async def test_a_program_gets_an_answer(name: str, mode: str, gateway: GatewayProcess, tmp_path: Path):
    client = program(name)
    home, folder = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    folder.mkdir()
    await asyncio.to_thread(connect, name, home, url=gateway.url, model=MODEL, mode=mode, max_output=64)

    answer = await run_program(client, PROMPT, home=home, folder=folder, model=MODEL)

    assert answer
    assert_served(gateway, mode, DIALECTS[name])


def by_openai_chat(url: str, mode: str) -> str | None:
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, default_headers={"X-Cache-Mode": mode}) as client:
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_openai_responses(url: str, mode: str) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key=KEY, default_headers={"X-Cache-Mode": mode}) as client:
        events = list(client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response.output_text


def by_anthropic(url: str, mode: str) -> str:
    with anthropic.Anthropic(base_url=url, api_key=KEY, default_headers={"X-Cache-Mode": mode}) as client:
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        with client.messages.stream(model=MODEL, max_tokens=16, messages=messages) as stream:
            return stream.get_final_text()


def by_gemini(url: str, mode: str) -> str | None:
    options = genai.types.HttpOptions(base_url=url, headers={"X-Cache-Mode": mode})
    with genai.Client(api_key=KEY, http_options=options) as client:
        chunks = client.models.generate_content_stream(
            model=MODEL, contents=PROMPT, config=genai.types.GenerateContentConfig(max_output_tokens=16)
        )
        return "".join(chunk.text or "" for chunk in chunks)


SDKS: dict[str, Callable[[str, str], str | None]] = {
    "openai_chat": by_openai_chat,
    "openai_responses": by_openai_responses,
    "anthropic_messages": by_anthropic,
    "gemini": by_gemini,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dialect", sorted(SDKS))
def test_an_sdk_gets_an_answer(dialect: str, mode: str, gateway: GatewayProcess):
    assert SDKS[dialect](gateway.url, mode)
    assert_served(gateway, mode, dialect)


@pytest.mark.parametrize("mode", MODES)
def test_llm_gets_an_answer(mode: str, gateway: GatewayProcess, tmp_path: Path):
    entry = {"model_id": MODEL, "model_name": MODEL, "api_base": gateway.url + "/v1", "headers": {"X-Cache-Mode": mode}}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    command = [str(Path(sys.executable).with_name("llm")), "-m", MODEL, "--key", KEY, "-o", "max_tokens", "16", PROMPT]
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert_served(gateway, mode, "openai_chat")
