"""The local engine behind the whole application: what becomes of each field, and what is refused by its name."""

from __future__ import annotations

import pytest
from web_support import local_settings, running

from backends.protocol.messages import ChatPrompt, TextPrompt, TokenPrompt
from gateway.core.types import Started
from gateway.settings.schema import RequestSettings
from gateway.upstreams.scripted import ScriptedUpstream, words

CHAT_FIELDS = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens",
    "ignore_eos", "stream", "stream_options", "n", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "user", "metadata", "cacheStrategy", "model", "chat_template_kwargs", "functions", "unheard_of",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_rv_01_null_is_absent_on_every_optional_field(path):
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        base = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        await gateway.post(path, base)
        for name in (*CHAT_FIELDS, "echo", "suffix", "best_of"):
            answer = await gateway.post(path, {**base, name: None})
            assert answer.status == 200, (name, answer.body)

    assert all(request.sampling == engine.requests[0].sampling for request in engine.requests)


BAD_MAX_TOKENS = [0, -1, "16", 1.5, True, [], {}]


@pytest.mark.parametrize("value", BAD_MAX_TOKENS)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_rv_02_a_bad_token_limit_is_refused_by_name_and_the_next_request_works(name, value):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(**{name: value})
        after = await gateway.chat()

    assert answer.status == 400
    assert answer.error["param"] == name
    assert name in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert after.status == 200


async def test_rv_02_what_is_not_answered_is_refused_not_ignored():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        for extra in ({"suffix": "x"}, {"best_of": 2}, {"n": 9}, {"n": 0}, {"logprobs": 6}, {"max_tokens": 0}):
            answer = await gateway.post("/v1/completions", {"prompt": "the sky is", **extra})
            assert answer.status == 400, extra
            assert answer.error["param"] == next(iter(extra))


async def test_rv_02_a_huge_token_limit_reaches_the_engine_which_clamps_it():
    engine = ScriptedUpstream([Started(3, 50, ("max_tokens was reduced to 50",)), *words("a")[1:]])
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(max_tokens=1_000_000_000)

    assert answer.status == 200
    assert engine.requests[0].sampling.max_tokens == 1_000_000_000
    assert answer.headers["X-Kvgate-Notice"] == "max_tokens was reduced to 50"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_rv_04_text_parts_are_the_joined_string_in_every_role(role):
    engine = ScriptedUpstream()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    async with running(local_settings(), engine) as gateway:
        for content in (parts, "ab"):
            assert (await gateway.chat(messages=[{"role": role, "content": content}])).status == 200

    assert engine.requests[0].prompt == engine.requests[1].prompt


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "input_text", None, 3])
async def test_rv_04_other_parts_are_refused_not_dropped(kind):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        content = [{"type": "text", "text": "a"}, {"type": kind, "image_url": {"url": "http://127.0.0.1:1/"}}]
        answer = await gateway.chat(messages=[{"role": "user", "content": content}])

    assert answer.status == 400
    assert "unsupported content part" in answer.error["message"]
    assert answer.error["param"] == "messages[0].content[1]"


async def test_rv_06_a_tool_choice_without_consequences_is_accepted():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        for fields in (
            {"tool_choice": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []},
            {"tools": [], "tool_choice": "auto"}, {"tools": None}, {"tools": [tool], "tool_choice": "none"},
        ):  # fmt: skip
            assert (await gateway.chat(**fields)).status == 200, fields
        for choice in ({"type": "function", "function": {"name": "g"}}, {"type": "any"}, "sometimes", 3, ["auto"]):
            answer = await gateway.chat(tools=[tool], tool_choice=choice)
            assert (answer.status, answer.error["param"]) == (400, "tool_choice")


async def test_tools_reach_the_template_and_a_notice_says_what_becomes_of_them():
    engine = ScriptedUpstream()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(tools=[tool])

    assert isinstance(engine.requests[0].prompt, ChatPrompt)
    assert engine.requests[0].prompt.tools == [tool]
    assert "tools" in answer.headers["X-Kvgate-Notice"]


@pytest.mark.parametrize(
    ("content", "status"),
    [([{"type": "text", "text": "18 degrees"}], 200), ("", 200), ({"temp": 18}, 400), (None, 400), (18, 400)],
)
async def test_rv_07_tool_content_is_text_or_parts(content, status):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        messages = [{"role": "user", "content": "t?"}, {"role": "tool", "tool_call_id": "c1", "content": content}]
        answer = await gateway.chat(messages=messages)

    assert answer.status == status
    if status == 400:
        assert answer.error["param"] == "messages[1].content"


@pytest.mark.parametrize("messages", [None, [], "hi", [None], [{}], [{"role": "robot", "content": "x"}], {"a": 1}])
async def test_messages_that_are_none_are_refused(messages):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post("/v1/chat/completions", {"messages": messages})

    assert answer.status == 400
    assert answer.error["param"].startswith("messages")


@pytest.mark.parametrize(
    "body",
    [b"[]", b"null", b'"x"', b"3", b"{", b"", b"  ", b'{"a":NaN}', b'{"a":"\xff"}', b"\xff\xfe{}",
     b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":1} x'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/chat/completions"])
async def test_rv_13_a_body_that_is_no_json_object_is_a_400_with_a_reason(path, body):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(path, body)
        after = await gateway.chat()

    assert answer.status == 400
    assert answer.error["message"].startswith("The body")
    assert after.status == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": ""}])
async def test_rv_13_a_byte_order_mark_and_any_content_type_are_accepted(headers):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        body = b'\xef\xbb\xbf{"messages":[{"role":"user","content":"x"}]}'
        answer = await gateway.post("/v1/chat/completions", body, headers=headers)

    assert answer.status == 200


async def test_rv_15_unknown_fields_are_named_once_and_ours_are_not_among_them():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        message = {"role": "user", "content": "x", "name": "bob", "metadata": {"_id": "1"}}
        answer = await gateway.chat(messages=[message], cacheStrategy="split", foo=1, user="u", store=False)
        bad = await gateway.chat(cacheStrategy="sideways")

    assert answer.headers["X-Kvgate-Notice"] == "unknown fields have no effect: foo"
    assert answer.headers["X-Cache-Mode"] == "split"
    assert bad.status == 400
    assert "merged" in bad.error["message"]


async def test_rv_18_the_newer_name_of_the_token_limit_wins_in_chat_only():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        await gateway.chat(max_completion_tokens=4, max_tokens=9)
        await gateway.chat(max_completion_tokens=4)
        answer = await gateway.post("/v1/completions", {"prompt": "x", "max_completion_tokens": 4, "max_tokens": 9})

    assert [request.sampling.max_tokens for request in engine.requests] == [4, 4, 9]
    assert "max_completion_tokens" in answer.headers["X-Kvgate-Notice"]


async def test_sampling_fields_reach_the_engine():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        await gateway.chat(
            temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=5, stop="x", logit_bias={"7": -100}, stop_token_ids=[2],
            min_tokens=1, max_tokens=9, ignore_eos=True, presence_penalty=1, frequency_penalty=-1,
        )  # fmt: skip

    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 0, 5)
    assert (sampling.stop, sampling.logit_bias, sampling.stop_token_ids) == (("x",), {7: -100.0}, (2,))
    assert sampling.ignore_eos


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 3), ("temperature", "1"), ("temperature", True), ("top_p", 0), ("top_p", 1.1), ("top_k", 1.5),
     ("min_p", -1), ("presence_penalty", 5), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 200}), ("logit_bias", []),
     ("seed", 2**70), ("stop", 3), ("stop", ["a", 1]), ("stop", ["a"] * 17), ("stop", [""]), ("stop_token_ids", [-1]),
     ("stop_token_ids", [True]), ("min_tokens", -1), ("stream", "yes"), ("stream_options", 3),
     ("stream_options", {"include_usage": 1}), ("model", 3), ("response_format", {"type": "xml"}),
     ("response_format", {"type": "json_schema"}), ("response_format", "json"), ("logprobs", 1), ("top_logprobs", 5),
     ("functions", [{}]), ("modalities", ["audio"]), ("n", 129), ("n", "1")],
)  # fmt: skip
async def test_a_bad_field_is_refused_by_its_name(name, value):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(**{name: value})

    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith(name)


async def test_completions_take_text_or_token_ids():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        for prompt in ("ab", ["ab"], [1, 2], [[1, 2]]):
            assert (await gateway.post("/v1/completions", {"prompt": prompt})).status == 200
        for prompt in (None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [True], 3, {}):
            answer = await gateway.post("/v1/completions", {"prompt": prompt})
            assert (answer.status, answer.error["param"]) == (400, "prompt"), prompt

    prompts = [request.prompt for request in engine.requests]
    assert prompts == [TextPrompt(text="ab")] * 2 + [TokenPrompt(token_ids=[1, 2])] * 2


async def test_completions_stream_text_and_say_their_default_length():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "x", "stream": True})

    assert answer.text() == "Hello world"
    assert answer.chunks()[0]["object"] == "text_completion"
    assert answer.chunks()[0]["id"].startswith("cmpl-")
    assert engine.requests[0].sampling.max_tokens == 16
    assert "16" in answer.headers["X-Kvgate-Notice"]


async def test_settings_fill_in_what_a_request_leaves_out_and_override_nothing():
    engine = ScriptedUpstream()
    defaults = RequestSettings(temperature=0.3, max_tokens=77, stream=True)
    async with running(local_settings(request=defaults), engine) as gateway:
        streamed = await gateway.chat()
        whole = await gateway.chat(temperature=1, max_completion_tokens=5, stream=False)

    first, second = (request.sampling for request in engine.requests)
    assert (first.temperature, first.max_tokens) == (0.3, 77)
    assert (second.temperature, second.max_tokens) == (1, 5)
    assert streamed.done
    assert whole.json()["object"] == "chat.completion"
