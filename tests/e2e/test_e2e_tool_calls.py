"""The bundled model beyond its own context, and its calls: forced ones are valid, a tool loop is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from support.gateway_process import GatewayProcess, running_gateway

CONFIG = """
[engine]
model = "smollm2"
max_model_len = 20480
"""
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}, "how": {"enum": ["whole", "head"]}},
    "required": ["path", "how"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "read_file", "description": "Reads a file.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "read_file"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
USER = {"role": "user", "content": "What is in the file a.txt?"}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running_gateway(CONFIG, tmp_path_factory.mktemp("bundled")) as gateway:
        gateway.wait_ready()
        yield gateway


def ask(gateway: GatewayProcess, mode: str = "merged", **fields: Any) -> tuple[dict[str, str], dict[str, Any]]:
    body = {"model": "smollm2", "messages": [USER], "max_tokens": 60, "temperature": 0, "tools": TOOLS} | fields
    status, headers, answer = gateway.call("POST", "/v1/chat/completions", body, {"X-Cache-Mode": mode})
    assert status == 200, answer
    return headers, answer["choices"][0]


@pytest.mark.parametrize("mode", ["merged", "split"])
@pytest.mark.parametrize("choice", [NAMED, ALLOWED])
def test_tc_06_even_the_bundled_model_writes_a_valid_call_when_forced(bundled, mode, choice):
    _, answer = ask(bundled, mode, tool_choice=choice, max_tokens=200)
    call = answer["message"]["tool_calls"][0]["function"]
    assert (answer["finish_reason"], call["name"]) == ("tool_calls", "read_file")
    Draft202012Validator(PARAMETERS).validate(json.loads(call["arguments"]))


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_a_tool_loop_is_answered_though_the_template_knows_no_tools(bundled, mode):
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"a.txt"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "The answer is forty-two."}
    headers, answer = ask(bundled, mode, messages=[USER, asked, result])
    assert "told of the tools in a system message" in headers["x-kvgate-notice"]
    assert answer["message"]["content"] or answer["message"]["tool_calls"]


def test_the_extended_context_is_told_in_the_log_and_in_the_models_list(bundled):
    entry = next(entry for entry in bundled.get("/v1/models")["data"] if entry["id"] == "smollm2")
    assert (entry["max_model_len"], entry["native_max_model_len"]) == (20480, 8192)
    assert entry["rope_scaling"] == "yarn, factor 2.5"
    assert "RoPE scaling (yarn, factor 2.5)" in bundled.log


def test_cx_02_more_tokens_than_there_is_room_for_are_clamped_and_told(bundled):
    headers, answer = ask(bundled, max_tokens=32_000, stop=["."], tools=None)
    assert "max_tokens 32000 exceeds the context" in headers["x-kvgate-notice"]
    assert answer["finish_reason"] in ("stop", "length")
