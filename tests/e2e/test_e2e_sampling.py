"""Choices, logprobs and grammars through real processes: both modes say the same, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from jsonschema import Draft202012Validator

from support.gateway_process import GatewayProcess

MODES = ["merged", "split"]
PROMPT = "the cache holds keys and values of every token that a model has read"
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "kind": {"enum": ["a", "b"]}},
    "required": ["word", "kind"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


async def post(
    session: aiohttp.ClientSession, gateway: GatewayProcess, path: str, mode: str = "merged", **fields: Any
) -> tuple[int, dict[str, Any]]:
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = {"model": "tiny", "temperature": 0, "max_tokens": 100, **prompt, **fields}
    async with session.post(gateway.url + path, json=body, headers={"X-Cache-Mode": mode}) as response:
        return response.status, await response.json()


async def stream(
    session: aiohttp.ClientSession, gateway: GatewayProcess, path: str, mode: str, **fields: Any
) -> list[dict[str, Any]]:
    """The choices of all chunks, in order."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = {"model": "tiny", "temperature": 0, "max_tokens": 100, "stream": True, **prompt, **fields}
    async with session.post(gateway.url + path, json=body, headers={"X-Cache-Mode": mode}) as response:
        assert response.status == 200
        lines = (await response.read()).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [choice for item in data[:-1] for choice in json.loads(item)["choices"]]


@pytest.mark.parametrize("mode", MODES)
async def test_json_of_a_schema_is_valid_streamed_and_whole(session, gateway, mode):
    fields = {"response_format": FORMAT, "temperature": 1, "seed": 3}
    status, whole = await post(session, gateway, "/v1/chat/completions", mode, **fields)
    assert status == 200
    content = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    Draft202012Validator(SCHEMA).validate(json.loads(content))
    choices = await stream(session, gateway, "/v1/chat/completions", mode, **fields)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == content


@pytest.mark.parametrize("mode", MODES)
async def test_tc_06_a_forced_call_ends_by_tool_calls(session, gateway, mode):
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    _, whole = await post(session, gateway, "/v1/chat/completions", mode, **fields)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    choices = await stream(session, gateway, "/v1/chat/completions", mode, **fields)
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == call["function"]["name"] == "look"
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


async def test_rv_11_a_bad_schema_is_a_400_among_streams_that_finish(session, gateway):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}}}
    streams = [
        stream(session, gateway, "/v1/completions", MODES[number % 2], ignore_eos=True, max_tokens=40)
        for number in range(8)
    ]
    requests = [post(session, gateway, "/v1/chat/completions", mode, response_format=bad) for mode in MODES]
    *answers, merged, split = await asyncio.gather(*streams, *requests)
    for status, body in (merged, split):
        assert (status, body["error"]["param"]) == (400, "response_format")
        assert body["error"]["type"] == "invalid_request_error"
    texts = {"".join(choice["text"] for choice in choices) for choices in answers}
    assert len(texts) == 1
    status, _ = await post(session, gateway, "/v1/completions")
    assert status == 200


async def test_rv_02_a_scored_prompt_is_the_same_in_both_modes_and_the_engine_lives(session, gateway):
    fields = {"max_tokens": 0, "echo": True, "logprobs": 2}
    answers = [await post(session, gateway, "/v1/completions", mode, **fields) for mode in MODES]
    for status, body in answers:
        assert status == 200
        choice = body["choices"][0]
        assert choice["text"] == PROMPT == "".join(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    merged, split = (body["choices"][0]["logprobs"] for _, body in answers)
    assert merged["token_logprobs"][1:] == pytest.approx(split["token_logprobs"][1:], abs=1e-4)
    assert merged["text_offset"] == split["text_offset"]
    assert (await post(session, gateway, "/v1/completions"))[0] == 200


@pytest.mark.parametrize("mode", MODES)
async def test_rv_09_choices_are_numbered_finished_once_and_counted(session, gateway, mode):
    fields = {"n": 3, "temperature": 1, "seed": 11, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
    _, whole = await post(session, gateway, "/v1/chat/completions", mode, **fields)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 36
    choices = await stream(session, gateway, "/v1/chat/completions", mode, **fields)
    for index, answer in enumerate(whole["choices"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in own) == answer["message"]["content"]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
        tokens = [item for choice in own if choice["logprobs"] for item in choice["logprobs"]["content"]]
        assert [item["token"] for item in tokens] == [item["token"] for item in answer["logprobs"]["content"]]
        assert len(tokens) == 12
