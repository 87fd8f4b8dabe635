"""The real litellm behind the gateway, against scripted servers of OpenAI's and Anthropic's API. Skipped without it."""

from __future__ import annotations

import asyncio
import json
import logging
from importlib.util import find_spec

import pytest
from web_support import (
    DONE,
    ROLE,
    USAGE,
    Hold,
    Reset,
    chunk,
    fake_upstream,
    http_answer,
    running,
    sse_answer,
)

from gateway.settings.schema import KeySettings, Settings, TargetSettings, TimeoutSettings
from support.waiting import until

pytestmark = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm"),  # its own, of pydantic
]

KEY = "sk-provider-secret-0123456789"
OPENAI, ANTHROPIC = "openai/m", "anthropic/claude-sonnet-4-5"
GOOD = (chunk(""), chunk("平"), chunk("台"), chunk(finish="stop"), USAGE, DONE)


def event(name, **fields):
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


STARTED = {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 1}
SAID = (
    event("message_start", message={"id": "msg_1", "type": "message", "role": "assistant", "model": "c", "content": [],
                                    "usage": STARTED}),
    event("content_block_start", index=0, content_block={"type": "thinking", "thinking": "", "signature": ""}),
    event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}),
    event("content_block_stop", index=0),
    event("content_block_start", index=1, content_block={"type": "text", "text": ""}),
    event("content_block_delta", index=1, delta={"type": "text_delta", "text": "a"}),
    event("content_block_stop", index=1),
)  # fmt: skip
CALLED = (
    event("content_block_start", index=2, content_block={"type": "tool_use", "id": "t1", "name": "f", "input": {}}),
    event("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '{"x":1}'}),
    event("content_block_stop", index=2),
    event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 9}),
    event("message_stop"),
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def settings(url, **more):
    base = f"{url}/v1"
    return Settings(
        targets=(
            TargetSettings(name="far", kind="litellm", base_url=base, api_key=KEY, models=(OPENAI,)),
            TargetSettings(name="claude", kind="litellm", base_url=url, api_key=KEY, models=(ANTHROPIC,)),
            TargetSettings(name="rest", kind="litellm", base_url=base, api_key=KEY),
        ),
        **more,
    )


async def asked(script, *, model=OPENAI, path="/v1/chat/completions", headers=None, **fields):
    """(answer, record, what the provider saw)."""
    backend = {} if model in (OPENAI, ANTHROPIC) else {"X-Cache-Backend": "rest"}
    body = {"messages": [{"role": "user", "content": "hi"}], "model": model, **fields}
    retry = {"retry": {"max_attempts": 1}}
    async with fake_upstream(script) as upstream, running(settings(upstream.url, **retry)) as gateway:
        answer = await gateway.post(path, body, headers={**backend, **(headers or {})})
        record = await gateway.record(answer)
        return answer, record, upstream


async def test_a_stream_of_an_openai_server_comes_through_with_its_counts():
    options = {"include_usage": True}
    answer, record, upstream = await asked(sse_answer(*GOOD), stream=True, stream_options=options)

    assert (answer.text(), answer.finish_reasons(), answer.done) == ("平台", ["stop"], True)
    last = answer.chunks()[-1]
    assert (last["choices"], last["usage"]["prompt_tokens_details"]["cached_tokens"]) == ([], 4)
    assert record["outcome"] == "ok"
    assert [record["timings"][name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [7, 3, 4]
    assert upstream.seen[0].header("authorization") == f"Bearer {KEY}"


async def test_usage_that_the_client_did_not_ask_for_is_not_sent_to_it():
    answer, record, _ = await asked(sse_answer(*GOOD), stream=True)
    assert all(found["choices"] for found in answer.chunks()), answer.body
    assert record["timings"]["prompt_tokens"] == 7


async def test_counts_that_the_provider_did_not_tell_are_not_known():
    steps = (chunk(""), chunk("平"), chunk(finish="stop"), DONE)
    answer, record, _ = await asked(sse_answer(*steps), stream=True, stream_options={"include_usage": True})
    message = {"role": "assistant", "content": "hello"}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "up"}
    body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    whole, its_record, _ = await asked(http_answer(json.dumps(body).encode()))

    assert (answer.text(), answer.done) == ("平", True)
    assert not any("usage" in found for found in answer.chunks())
    assert "usage" not in whole.json()
    assert "prompt_tokens" not in {**record["timings"], **its_record["timings"]}


async def test_an_answer_in_one_piece():
    message = {"role": "assistant", "content": "hello"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "up", "usage": usage}
    body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    answer, record, _ = await asked(http_answer(json.dumps(body).encode()))

    said = answer.json()
    assert said["object"] == "chat.completion"
    assert said["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]
    assert said["usage"] == usage
    assert record["timings"]["completion_tokens"] == 3


EXTRAS = {
    "top_k": 20,
    "min_p": 0.1,
    "chat_template_kwargs": {"enable_thinking": False},
    "priority": 1,
    "future_field": [1, {"a": 2}],
}


@pytest.mark.parametrize("model", [OPENAI, "hosted_vllm/m", "openrouter/a/m", "deepseek/m", "groq/m", "together_ai/m"])
async def test_rv_16_and_rv_17_fields_that_nobody_knows_arrive_and_no_extra_body_does(model):
    said = {"temperature": 0.5, "max_tokens": 9, "stop": ["x"], **EXTRAS}
    answer, _, upstream = await asked(sse_answer(*GOOD), model=model, stream=True, **said)

    sent = upstream.seen[0].json()
    assert answer.text() == "平台", answer.body
    assert "extra_body" not in sent
    assert {name: sent.get(name) for name in said} == said


async def test_rv_17_an_extra_body_of_the_client_is_refused_by_name():
    answer, _, upstream = await asked(sse_answer(*GOOD), extra_body={"top_k": 5})
    assert (answer.status, answer.error["param"]) == (400, "extra_body")
    assert upstream.seen == []


async def test_a_client_can_not_turn_litellm_to_another_server():
    fields = {"api_base": "http://127.0.0.1:1", "api_key": "sk-x", "mock_response": "no", "custom_llm_provider": "groq"}
    answer, _, upstream = await asked(sse_answer(*SAID, *CALLED), model=ANTHROPIC, stream=True, max_tokens=5, **fields)
    assert upstream.seen[0].header("x-api-key") == KEY
    assert not set(fields) & set(upstream.seen[0].json())
    assert "mock_response" in answer.headers["X-Kvgate-Notice"]


async def test_another_provider_s_reasoning_calls_and_counts():
    answer, record, upstream = await asked(
        sse_answer(*SAID, *CALLED), model=ANTHROPIC, stream=True, max_tokens=50, tools=TOOLS
    )
    deltas = [choice["delta"] for found in answer.chunks() for choice in found["choices"]]

    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert answer.text() == "a"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"x":1}'
    assert (answer.finish_reasons(), answer.done) == (["tool_calls"], True)
    assert [record["timings"][name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [11, 9, 4]
    assert record["cost_usd"] > 0
    assert upstream.seen[0].path == "/v1/messages"
    assert "extra_body" not in upstream.seen[0].json()


async def test_a_client_of_another_api_is_translated():
    body = {"max_tokens": 50, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    answer, _, _ = await asked(sse_answer(*SAID, *CALLED), model=ANTHROPIC, path="/v1/messages", stream=True, **body)
    assert b'"type":"thinking_delta","thinking":"hm"' in answer.body
    assert b'"type":"tool_use"' in answer.body
    assert b"event: message_stop" in answer.body


BROKEN = {
    "reset": (*SAID, Reset()),
    "close": SAID,
    "error": (*SAID, event("error", error={"type": "overloaded_error", "message": f"busy {KEY}"})),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_st_10_a_broken_stream_never_ends_like_a_whole_one(case):
    answer, record, _ = await asked(sse_answer(*BROKEN[case]), model=ANTHROPIC, stream=True, max_tokens=5)
    assert (answer.status, answer.done, answer.finish_reasons()) == (200, False, [])
    assert "error" in answer.chunks()[-1]
    assert record["outcome"] == "error"
    assert KEY.encode() not in answer.body


@pytest.mark.parametrize("steps", [(), (ROLE,), (ROLE, Reset())], ids=["empty", "role", "reset"])
async def test_st_10_a_break_before_any_text_is_an_http_error(steps):
    answer, record, _ = await asked(sse_answer(*steps), stream=True)
    assert (answer.status, record["outcome"]) == (502, "error")


async def test_st_10_half_an_answer_in_one_piece_is_an_error():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    answer, record, _ = await asked([head + b'{"id":"x","choices":[{"index":0,"mess', Reset()])
    assert (answer.status, record["outcome"]) == (502, "error")


ERRORS = {
    "limit": (
        http_answer(b'{"error":{"message":"slow","code":"x"}}', status="429 No", extra="Retry-After: 7\r\n"),
        429,
    ),
    "key": (http_answer(json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), status="401 No"), 401),
    "broken": (http_answer(b'{"error":{"message":"oh"}}', status="500 No"), 500),
    "page": (http_answer(b"<html>no</html>", status="503 No", content_type="text/html"), 503),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", ERRORS)
async def test_st_13_a_provider_s_error_keeps_its_status_and_tells_no_key(case, stream, caplog):
    caplog.set_level(logging.DEBUG)
    script, status = ERRORS[case]
    answer, _, upstream = await asked(script, stream=stream)

    assert answer.status == status
    assert answer.headers.get("Retry-After") == ("7" if case == "limit" else None)
    assert KEY.encode() not in answer.body
    assert KEY not in caplog.text
    assert len(upstream.seen) == 1, "the gateway decides whether to ask again"


async def test_an_overflow_is_one_that_clients_compact_on():
    message = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    error = {"error": {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}}
    answer, _, _ = await asked(http_answer(json.dumps(error).encode(), status="400 Bad"))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_nobody_there_is_a_502_that_says_so():
    more = {"retry": {"max_attempts": 1}}
    async with running(settings("http://127.0.0.1:9", **more)) as gateway:
        for model in (OPENAI, ANTHROPIC):
            answer = await gateway.chat(model=model, max_tokens=5)
            assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")


async def test_what_a_provider_does_not_take_is_refused_or_said():
    refused, _, upstream = await asked(sse_answer(*SAID, *CALLED), model=ANTHROPIC, logit_bias={"1": 2}, max_tokens=5)
    assert (refused.status, refused.error["param"]) == (400, "logit_bias")
    assert upstream.seen == []

    said, _, _ = await asked(sse_answer(*SAID, *CALLED), model=ANTHROPIC, seed=1, max_tokens=5, n=1, stream=True)
    assert said.status == 200
    assert "seed is left out" in said.headers["X-Kvgate-Notice"]


async def test_a_model_without_a_provider_is_explained():
    answer, _, _ = await asked(sse_answer(*GOOD), model="nonsense")
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "PROVIDER/MODEL" in answer.error["message"]


@pytest.mark.parametrize("model", [OPENAI, ANTHROPIC])
async def test_st_18_a_client_that_leaves_hangs_up_the_provider(model):
    steps = (ROLE, chunk("a"), Hold()) if model == OPENAI else (*SAID, Hold())
    async with fake_upstream(sse_answer(*steps)) as upstream, running(settings(upstream.url)) as gateway:
        task = asyncio.create_task(gateway.chat(model=model, stream=True, max_tokens=5))
        await until(lambda: upstream.seen)
        task.cancel()
        await until(lambda: upstream.num_gone == 1, "the provider saw the connection end")


async def test_st_23_silence_is_limited():
    more = {"timeouts": TimeoutSettings(idle_seconds=0.2, first_byte_seconds=0.5), "retry": {"max_attempts": 1}}
    steps = sse_answer(ROLE, chunk("a"), Hold())
    async with fake_upstream(steps) as upstream, running(settings(upstream.url, **more)) as gateway:
        answer = await gateway.chat(model=OPENAI, stream=True)
        assert answer.chunks()[-1]["error"]["code"] == "upstream_timeout"
    async with fake_upstream([Hold()]) as upstream, running(settings(upstream.url, **more)) as gateway:
        assert (await gateway.chat(model=OPENAI)).status == 504


async def test_models_have_the_sizes_of_its_table_and_a_budget_its_prices():
    key = KeySettings(key="sk-client", name="c", budget_usd=1e-7)
    headers = {"Authorization": "Bearer sk-client"}
    answers = fake_upstream(sse_answer(*SAID, *CALLED))
    async with answers as upstream, running(settings(upstream.url, keys=(key,))) as gateway:
        listed = (await gateway.get("/v1/models", headers=headers)).json()["data"]
        first = await gateway.chat(model=ANTHROPIC, max_tokens=5, stream=True, headers=headers)
        second = await gateway.chat(model=ANTHROPIC, max_tokens=5, stream=True, headers=headers)
        unpriced = await gateway.chat(model=OPENAI, headers=headers)

    assert next(entry for entry in listed if entry["id"] == ANTHROPIC)["max_model_len"] >= 200_000
    assert (first.status, second.status, second.error["code"]) == (200, 429, "insufficient_quota"), first.body
    assert (unpriced.status, unpriced.error["code"]) == (403, "key_not_allowed")


# ------------------------------------------------------------------------------------------------------- redirects


@pytest.mark.filterwarnings("ignore")  # of what litellm and pydantic import for each provider
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize(
    "model",
    [OPENAI, ANTHROPIC, "hosted_vllm/m", "openrouter/a/m", "azure/m", "text-completion-openai/m",
     "gemini/gemini-2.0-flash", "ollama_chat/m", "cohere/command-r"],
)  # fmt: skip
async def test_a_redirect_is_not_followed_whoever_the_provider_is(model, status, stream):
    """Neither key nor prompt may go to where it leads."""
    async with fake_upstream(http_answer(b"{}")) as elsewhere:
        script = http_answer(
            b"{}", status=f"{status} Found", extra=f"Connection: close\r\nLocation: {elsewhere.url}/v1/x\r\n"
        )
        answer, _, upstream = await asked(script, model=model, stream=stream)

    assert (len(upstream.seen), len(elsewhere.seen)) == (1, 0)
    assert answer.status == 502
    assert f"answered {status}, a redirect, which is not followed" in answer.error["message"]
    assert "base_url" in answer.error["message"]


async def test_a_provider_whose_client_follows_redirects_is_refused():
    answer, _, upstream = await asked(http_answer(b"{}"), model="aiohttp_openai/m")
    assert (answer.status, answer.error["param"], len(upstream.seen)) == (400, "model", 0)
    assert "openai/MODEL" in answer.error["message"]
