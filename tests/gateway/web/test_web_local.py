"""The local engine behind the whole application: fields, streams, headers, aborts."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from web_support import local_settings, running, until

from backends.protocol.messages import ChatPrompt, TextPrompt, Timings, TokenPrompt, Usage
from gateway.core.errors import ContextLengthExceeded, KVPoolTooSmall, UpstreamGone
from gateway.core.types import CacheMode, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import LimitSettings, RequestSettings, TimeoutSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words

CHAT_FIELDS = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens",
    "ignore_eos", "stream", "stream_options", "n", "logprobs", "top_logprobs", "response_format", "tools",
    "tool_choice", "user", "metadata", "cacheStrategy", "model", "chat_template_kwargs", "functions", "unheard_of",
)  # fmt: skip


async def test_a_stream_has_role_text_finish_and_done_in_this_order():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(model="scripted", stream=True)

    chunks = answer.chunks()
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.text() == "Hello world"
    assert answer.finish_reasons() == ["stop"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert answer.data()[-1] == b"[DONE]"
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert "usage" not in chunks[-1]


async def test_a_whole_answer_has_text_and_usage():
    usage = Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=8)
    script = [Started(10, 5), TextDelta("ab", 2), Finished(FinishReason.LENGTH, usage, Timings())]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = (await gateway.chat()).json()

    assert answer["choices"][0]["message"]["content"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert answer["model"] == "scripted"


@pytest.mark.parametrize("asked", [None, False, True])
async def test_st_14_usage_is_sent_once_and_only_if_asked(asked):
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        chunks = (await gateway.chat(stream=True, **options)).chunks()

    with_usage = [c for c in chunks if c.get("usage")]
    if asked:
        assert [c["choices"] for c in with_usage] == [[]]
        assert all(c["usage"] is None for c in chunks if c not in with_usage)
    else:
        assert with_usage == []
        assert all(c["choices"] for c in chunks)


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


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthExceeded("maximum context length is 8 tokens"), 400, "context_length_exceeded"),
        (KVPoolTooSmall("the pool holds 64 tokens"), 400, "kv_pool_too_small"),
        (UpstreamGone("died"), 502, "upstream_gone"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_cx_01_an_error_before_the_first_text_is_an_http_error(error, status, code, stream):
    async with running(local_settings(), ScriptedUpstream([Started(1, 1), TextDelta("", 1), error])) as gateway:
        answer = await gateway.chat(stream=stream)

    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Cache-Mode"] == "merged"


async def test_st_10_an_engine_that_dies_after_text_ends_with_an_error_event_and_nothing_clean():
    script = [Started(1, 9), TextDelta("half", 1), UpstreamGone("The engine died.")]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = await gateway.chat(stream=True)
        failed = await gateway.metric(
            "kvgate_requests_total", dialect="openai_chat", cache_mode="merged", backend="local", outcome="error"
        )

    assert answer.status == 200
    assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_gone"
    assert not answer.done
    assert answer.finish_reasons() == []
    assert failed == 1


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_st_10_an_aborted_generation_never_looks_finished(reason):
    async with running(local_settings(), ScriptedUpstream(words("a", reason=reason))) as gateway:
        streamed = await gateway.chat(stream=True)
        whole = await gateway.chat()

    assert not streamed.done
    assert whole.status == 502


@pytest.mark.parametrize("stream", [True, False])
async def test_st_18_a_client_that_leaves_aborts_the_generation(stream):
    engine = ScriptedUpstream([Started(1, 9), TextDelta("a", 1), Pause(asyncio.Event())])
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=stream))
        await until(lambda: engine.requests)
        task.cancel()
        await until(lambda: engine.aborted)
        await until(lambda: len(gateway.records))
        after = await gateway.get(f"/v1/requests/{engine.aborted[0]}")

    assert engine.aborted == [engine.requests[0].request_id]
    assert after.json()["outcome"] == "client_gone"


async def test_a_client_that_leaves_before_the_first_text_aborts_too():
    engine = ScriptedUpstream([Started(1, 9), Pause(asyncio.Event())])
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: engine.requests)
        task.cancel()
        await until(lambda: engine.aborted)


async def test_silence_gets_heartbeats_and_headers_go_ahead_of_the_text():
    go = asyncio.Event()
    engine = ScriptedUpstream([Started(1, 9), Pause(go), *words("late")[1:]])
    settings = local_settings(timeouts=TimeoutSettings(heartbeat_seconds=0.02))
    async with running(settings, engine) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert response.headers["X-Cache-Mode"] == "merged"
            read = b""
            while read.count(b": keep-alive\n\n") < 3:
                read += await response.content.readany()
            go.set()
            read += await response.content.read()

    assert read.startswith(b": keep-alive\n\n")
    assert b"late" in read
    assert read.endswith(b"data: [DONE]\n\n")


async def test_an_error_after_heartbeats_is_an_event():
    go = asyncio.Event()
    engine = ScriptedUpstream([Started(1, 9), Pause(go), UpstreamGone("died")])
    async with running(local_settings(timeouts=TimeoutSettings(heartbeat_seconds=0.01)), engine) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            await response.content.readany()
            go.set()
            rest = await response.content.read()

    assert b'data: {"error":' in rest
    assert b"[DONE]" not in rest


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_takes_too_long_ends_and_is_aborted(stream):
    engine = ScriptedUpstream([Started(1, 9), TextDelta("a", 1), Pause(asyncio.Event())])
    async with running(local_settings(request=RequestSettings(timeout_seconds=0.05)), engine) as gateway:
        answer = await gateway.chat(stream=stream)
        await until(lambda: engine.aborted)
        record = (await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")).json()

    assert (record["outcome"], [tried["outcome"] for tried in record["attempts"]]) == ("timeout", ["timeout"])
    if stream:
        assert json.loads(answer.data()[-1])["error"]["code"] == "upstream_timeout"
        assert not answer.done
    else:
        assert answer.status == 504


async def test_headers_say_what_was_asked_what_served_and_why():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        asked = await gateway.chat(headers={"X-Cache-Mode": "disaggregated"}, stream=True)
        suffix = await gateway.chat(model="scripted:split")
        plain = await gateway.chat()
        by_path = await gateway.chat(path="/split/chat/completions")

    assert asked.headers["X-Cache-Mode"] == "split"
    assert asked.headers["X-Cache-Mode-Requested"] == "disaggregated"
    assert asked.headers["X-Cache-Mode-Source"] == "header"
    assert asked.headers["X-Cache-Mode-Reason"] == "local model"
    assert asked.headers["X-Cache-Backend"] == "local"
    assert (suffix.headers["X-Cache-Mode"], suffix.headers["X-Cache-Mode-Source"]) == ("split", "model")
    assert suffix.json()["model"] == "scripted"
    assert (plain.headers["X-Cache-Mode"], plain.headers["X-Cache-Mode-Source"]) == ("merged", "default")
    assert (by_path.headers["X-Cache-Mode"], by_path.headers["X-Cache-Mode-Source"]) == ("split", "path")
    assert "total;dur=" in plain.headers["Server-Timing"]
    assert "ttft;dur=" in asked.headers["Server-Timing"]


async def test_a_mode_that_cannot_be_served_is_refused_and_no_other_serves():
    engine = ScriptedUpstream(served_modes=(CacheMode.MERGED,))
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.chat(headers={"X-Cache-Mode": "split"}, stream=True)

    assert (answer.status, answer.error["code"]) == (503, "mode_unavailable")
    assert answer.headers["Retry-After"] == "1"
    assert engine.requests == []


async def test_timings_come_before_done_and_in_the_record():
    timings = Timings(
        queue_seconds=0.1, prefill_seconds=0.2, transfer_seconds=0.04, transfer_overlapped_seconds=0.03,
        transfer_bytes=1000, decode_seconds=0.5, peak_kv_blocks={"decode": 4},
    )  # fmt: skip
    usage = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=3)
    script = [Started(9, 9), TextDelta("secret", 1), TextDelta("text", 1), Finished(FinishReason.STOP, usage, timings)]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = await gateway.chat(stream=True, headers={"X-Cache-Mode": "split", "X-Request-Id": "mine"})
        record = await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")
        missing = await gateway.get("/v1/requests/mine")
        moved = await gateway.metric("kvgate_kv_transfer_bytes_total", cache_mode="split", backend="local")
        overlap = await gateway.metric("kvgate_kv_transfer_overlap_ratio_sum", cache_mode="split", backend="local")

    before_done = answer.body.split(b"data: [DONE]")[0]
    comment = json.loads(before_done.split(b": kvgate ")[1].splitlines()[0])
    kept = record.json()
    for facts in (comment, kept["timings"]):
        assert facts["transfer_bytes"] == 1000
        assert facts["transfer_overlap_ratio"] == pytest.approx(0.75)
        assert facts["peak_kv_blocks"] == {"decode": 4}
        assert facts["cached_tokens"] == 3
        assert facts["time_to_first_token_seconds"] > 0
    assert (kept["outcome"], kept["status"], kept["client_request_id"]) == ("ok", 200, "mine")
    assert "secret" not in record.body.decode()
    assert missing.status == 404
    assert moved == 1000
    assert overlap == pytest.approx(0.75)


async def test_mt_01_held_back_text_is_not_the_first_token():
    go, held = asyncio.Event(), 0.05
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    script = [
        Started(1, 9), TextDelta("", 1), Pause(go), TextDelta("x", 1), Finished(FinishReason.STOP, usage, Timings()),
    ]  # fmt: skip
    engine = ScriptedUpstream(script)
    async with running(local_settings(), engine) as gateway:
        task = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: engine.requests)
        since = time.monotonic()
        await until(lambda: time.monotonic() - since > held)
        go.set()
        answer = await task
        record = (await gateway.get(f"/v1/requests/{answer.headers['X-Request-Id']}")).json()

    assert record["timings"]["time_to_first_token_seconds"] >= held


async def test_lc_01_the_same_client_id_twice_at_once_crosses_nothing():
    go = asyncio.Event()

    def script(request):
        name = request.prompt.messages[0]["content"]
        return [Started(1, 9), TextDelta(name, 1), Pause(go), *words("!")[1:]]

    engine = ScriptedUpstream(script)
    async with running(local_settings(), engine) as gateway:
        tasks = [
            asyncio.create_task(
                gateway.chat(messages=[{"role": "user", "content": name}], headers={"X-Request-Id": "same"})
            )
            for name in ("one", "two")
        ]
        await until(lambda: len(engine.requests) == 2)
        go.set()
        answers = await asyncio.gather(*tasks)

    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["one!", "two!"]
    assert len({a.headers["X-Request-Id"] for a in answers}) == 2
    assert {a.headers["X-Client-Request-Id"] for a in answers} == {"same"}


async def test_lc_06_too_many_at_once_get_429_and_when_to_come_back():
    engine = ScriptedUpstream([Started(1, 9), Pause(asyncio.Event())])
    async with running(local_settings(limits=LimitSettings(max_concurrent_requests=1)), engine) as gateway:
        first = asyncio.create_task(gateway.chat())
        await until(lambda: engine.requests)
        second = await gateway.chat()
        first.cancel()
        await until(lambda: engine.aborted)

    assert (second.status, second.error["code"]) == (429, "queue_full")
    assert second.headers["Retry-After"] == "1"


async def test_mt_02_what_a_client_writes_never_becomes_a_series():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        await gateway.chat(model="scripted")
        await gateway.chat(model="wrong")
        before = len((await gateway.get("/metrics")).body.splitlines())
        for number in range(50):
            await gateway.chat(model=f"m{number}", user=f"u{number}", headers={"X-Request-Id": f"r{number}"})
            await gateway.get(f"/path/{number}")
        after = await gateway.get("/metrics")

    assert len(after.body.splitlines()) == before
    assert b"m49" not in after.body


async def test_an_unknown_model_gets_the_list_of_models():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(model="gpt-9")

    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "scripted" in answer.error["message"]
