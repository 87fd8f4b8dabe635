"""Every client API over the whole application with a scripted engine: places, shapes, heartbeats, errors, counting."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence

import pytest
from web_support import fake_upstream, http_answer, local_settings, running, upstream_settings

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import ContextLengthExceeded, GatewayError, ModeUnavailable, Overloaded, UpstreamGone
from gateway.core.types import Finished, FinishReason, ReasoningDelta, Started, TextDelta, ToolCallDelta
from gateway.service import Body
from gateway.settings.schema import KeySettings, LimitSettings, TargetSettings, TimeoutSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream, words
from support.waiting import until

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "messages": {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
}
CHATS = ("chat/completions", "messages", "responses")
PREFIXES = ("", "/v1", "/api", "/api/v1", "/v1/v1")
QUICK = TimeoutSettings(heartbeat_seconds=0.05)


class Counting(ScriptedUpstream):
    """An engine that knows how long a prompt is."""

    async def count_tokens(self, request) -> int:
        self.requests.append(request)
        return 7


def events_of(answer):
    """(event, data) of each event; data lines of every dialect but chat's are typed objects."""
    found = []
    for block in answer.body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            event = next((line[7:] for line in lines if line.startswith("event: ")), "")
            found.append((event, "\n".join(line[6:] for line in lines if line.startswith("data: "))))
    return found


def said(place, body):
    """The text of an answer in one piece, in whichever shape."""
    match place:
        case "chat/completions":
            return body["choices"][0]["message"]["content"]
        case "completions":
            return body["choices"][0]["text"]
        case "messages":
            return "".join(block["text"] for block in body["content"] if block["type"] == "text")
        case _:
            parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
            return "".join(part["text"] for part in parts)


# ------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("place", BODIES)
async def test_ht_14_every_api_is_served_under_every_prefix_and_mode(place):
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        for mode in ("", "/merged", "/split"):
            for prefix in PREFIXES:
                answer = await gateway.post(f"{mode}{prefix}/{place}/?beta=true", BODIES[place])
                assert (answer.status, said(place, answer.json())) == (200, "Hello world")
                assert answer.headers["X-Cache-Mode"] == (mode.lstrip("/") or "merged")


@pytest.mark.parametrize("path", ["/", "/v1", "/split", "/split/", "/health"])
async def test_ht_14_probes_of_a_base_url_are_answered(path):
    async with running(local_settings(keys=(KeySettings(key="k", name="n"),)), ScriptedUpstream()) as gateway:
        statuses = [(await gateway.call(method, path)).status for method in ("HEAD", "GET")]
    assert statuses == ([200, 200] if path != "/v1" else [401, 401])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/split/v1/responses/compact"])
async def test_parts_of_an_api_that_are_not_here_are_a_404_in_json(path):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(path, {"input": "x"})
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/messages", 405)])
async def test_errors_outside_an_api_have_the_shape_of_whoever_asks(path, status):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        as_anthropic = await gateway.get(path, headers={"anthropic-version": "2023-06-01"})
        as_openai = await gateway.get("/nothing")

    assert (as_anthropic.status, as_anthropic.json()["type"]) == (status, "error")
    assert set(as_openai.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("prefix", ["/v1", "", "/api/v1", "/split/v1", "/v1/v1"])
@pytest.mark.parametrize(
    "rest", ["messages/xyz", "messages/batches", "messages/batches/a/results", "complete", "organizations/a/usage"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_path_of_anthropic_s_api_is_told_in_its_shape(prefix, rest, method):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.call(method, f"{prefix}/{rest}")
        chat = await gateway.call(method, f"{prefix}/chat/{rest}")

    assert (answer.status, answer.json()["type"], answer.error["type"]) == (404, "error", "not_found_error")
    assert set(chat.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n"])
async def test_ht_09_what_is_no_http_is_refused_as_json(raw):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.raw(raw)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert b"Content-Type: application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


# --------------------------------------------------------------------------------------------------------------- keys

KEYED = local_settings(keys=(KeySettings(key="sk-a", name="a"),))


@pytest.mark.parametrize("place", [*BODIES, "messages/count_tokens"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "bearer   sk-a "}, 200),
        ({"x-api-key": "sk-a"}, 200),
        ({"x-goog-api-key": "sk-a"}, 200),
        ({"x-api-key": "sk-a", "Authorization": "Bearer sk-a"}, 200),
        ({"x-api-key": "sk-a", "x-goog-api-key": "sk-b"}, 401),
        ({"Authorization": "sk-a"}, 401),
        ({}, 401),
    ],
)
async def test_au_04_either_header_carries_the_key_on_every_api(place, headers, status):
    async with running(KEYED, Counting()) as gateway:
        answer = await gateway.post(f"/v1/{place}", BODIES.get(place, BODIES["messages"]), headers=headers)
    assert answer.status == status
    if status == 401:
        assert "sk-a" not in answer.body.decode()
        assert (answer.json().get("type") == "error") == place.startswith("messages")


@pytest.mark.parametrize("place", [*BODIES, "messages/count_tokens"])
@pytest.mark.parametrize(
    "value", ["Bearer  sk-a", "Bearer    sk-a  ", "bearer \t sk-a", "  Bearer sk-a", "BEARER   sk-a"]
)
async def test_au_10_extra_spaces_between_scheme_and_key_are_accepted(place, value):
    """As they stand in the request's bytes: a client library might trim them."""
    data = json.dumps(BODIES.get(place, BODIES["messages"])).encode()
    head = f"POST /v1/{place} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {value}\r\nConnection: close\r\n"
    async with running(KEYED, Counting()) as gateway:
        answer = await gateway.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wrong = await gateway.post(f"/v1/{place}", data, headers={"Authorization": value.replace("sk-a", "sk-b")})
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert wrong.status == 401


# ------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("place", [*BODIES, "messages/count_tokens"])
@pytest.mark.parametrize(
    "body",
    [b"[]", b"null", b'"x"', b"3", b"{", b"", b"\xff\xfe{}", b'{"a":' * 100_000],
    ids=lambda body: repr(body[:8]),
)
async def test_rv_13_a_body_that_is_no_object_is_a_400_on_every_api(place, body):
    async with running(local_settings(), Counting()) as gateway:
        answer = await gateway.post(f"/v1/{place}", body)
        after = await gateway.chat()
    assert (answer.status, after.status) == (400, 200)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("place", [*BODIES, "messages/count_tokens"])
async def test_ht_06_too_large_a_body_is_told_in_the_api_s_own_shape(place):
    async with running(local_settings(limits=LimitSettings(max_request_mib=0.001)), Counting()) as gateway:
        answer = await gateway.post(f"/v1/{place}", b" " * 5000)
    assert answer.status == 413
    assert (answer.json().get("type") == "error") == place.startswith("messages")


def large_bodies():
    """Other tests' small ones may live on in the tracebacks of the errors that they share."""
    return [found for found in gc.get_objects() if type(found) is Body and len(found.data) > 2**20]


@pytest.mark.parametrize("place", ["chat/completions", "messages"])
@pytest.mark.parametrize("is_valid", [True, False])
async def test_a_large_body_is_given_back_at_once(place, is_valid):
    """Also of a request that was refused: nothing waits for the garbage collector."""
    body = {**BODIES[place], "seed" if place != "messages" else "top_k": 1 if is_valid else "x", "padding": "x" * 2**20}
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        await gateway.post(f"/v1/{place}", body)
        gc.collect()
        gc.disable()
        try:
            status = (await gateway.post(f"/v1/{place}", body)).status
            await until(lambda: not large_bodies(), "no body is left")
        finally:
            gc.enable()
    assert (status == 200) == is_valid


URLS = ["http://127.0.0.1:1/", "http://[::1]/", "http://169.254.169.254/", "file:///etc/hostname", "http://0x7f000001/"]


@pytest.mark.parametrize("url", URLS)
async def test_ht_10_a_text_model_fetches_no_media_url(url):
    image = {
        "chat/completions": {"type": "image_url", "image_url": {"url": url}},
        "messages": {"type": "image", "source": {"type": "url", "url": url}},
        "responses": {"type": "input_image", "image_url": url},
    }
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        for place, part in image.items():
            body = dict(BODIES[place])
            body["input" if place == "responses" else "messages"] = [{"role": "user", "content": [part]}]
            answer = await gateway.post(f"/v1/{place}", body)
            assert answer.status == 400, (place, answer.body)
    assert engine.requests == []


# ----------------------------------------------------------------------------------------------------------- answers


def script(*deltas, reason=FinishReason.STOP):
    usage = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4)
    return [Started(9, 100, instance="merged-1"), *deltas, Finished(reason, usage, Timings())]


RICH: Sequence = (
    ReasoningDelta("hm", 1),
    TextDelta("Look", 1),
    ToolCallDelta(0, 0, "call_1", "read", '{"path"'),
    ToolCallDelta(0, 0, "call_1", arguments=':"a"}'),
    ToolCallDelta(0, 1, "call_2", "list", ""),
)


async def test_reasoning_text_and_calls_reach_a_chat_client():
    async with running(local_settings(), ScriptedUpstream(script(*RICH, reason=FinishReason.TOOL_CALLS))) as gateway:
        whole = (await gateway.chat()).json()
        stream = await gateway.chat(stream=True, stream_options={"include_usage": True})

    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Look")
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("call_1", "read", '{"path":"a"}'),
        ("call_2", "list", ""),
    ]
    deltas = [choice["delta"] for chunk in stream.chunks() for choice in chunk["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["hm"]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 0, 1]
    assert stream.finish_reasons() == [whole["choices"][0]["finish_reason"]] == ["tool_calls"]
    assert stream.chunks()[-1]["usage"] == whole["usage"]
    assert stream.data()[-1] == b"[DONE]"


async def test_every_api_tells_usage_and_calls_in_its_own_fields():
    async with running(local_settings(), ScriptedUpstream(script(*RICH, reason=FinishReason.TOOL_CALLS))) as gateway:
        message = (await gateway.post("/v1/messages", BODIES["messages"])).json()
        response = (await gateway.post("/v1/responses", BODIES["responses"])).json()

    assert message["stop_reason"] == "tool_use"
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (5, 4)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 4


@pytest.mark.parametrize("place", CHATS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_instance_that_took_a_request_is_named(place, stream):
    async with running(local_settings(), ScriptedUpstream(script(TextDelta("a", 1)))) as gateway:
        answer = await gateway.post(f"/v1/{place}", {**BODIES[place], "stream": stream})
    assert answer.headers["X-Cache-Instance"] == "merged-1"


async def test_a_response_goes_on_from_an_earlier_one_of_the_same_key_only():
    settings = local_settings(keys=(KeySettings(key="sk-a", name="a"), KeySettings(key="sk-b", name="b")))
    engine = ScriptedUpstream()
    async with running(settings, engine) as gateway:
        for stream in (False, True):
            headers = {"x-api-key": "sk-a"}
            first = await gateway.post("/v1/responses", {"input": "My name is Ada.", "stream": stream}, headers=headers)
            events = [json.loads(data) for _, data in events_of(first)] if stream else []
            answer_id = events[-1]["response"]["id"] if stream else first.json()["id"]
            body = {"input": "Who am I?", "previous_response_id": answer_id}
            second = await gateway.post("/v1/responses", body, headers=headers)
            other = await gateway.post("/v1/responses", body, headers={"x-api-key": "sk-b"})

            assert second.status == 200
            texts = [message["content"] for message in engine.requests[-1].prompt.messages]
            assert texts == ["My name is Ada.", "Hello world", "Who am I?"]
            assert other.status in (400, 404)


async def test_the_turns_of_a_conversation_share_a_session():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        for place in CHATS:
            await gateway.post(f"/v1/{place}", BODIES[place], headers={"x-session-id": "s"})
        await gateway.chat()
    sessions = [request.session for request in engine.requests]
    assert len(set(sessions[:3])) == 1
    assert None is not sessions[3] != sessions[0]


# ------------------------------------------------------------------------------------------------------------- errors

OVERFLOW = ContextLengthExceeded(
    "This model's maximum context length is 8192 tokens. However, your prompt has 9000 tokens. Please reduce it."
)


@pytest.mark.parametrize("stream", [False, True])
async def test_cx_01_an_overflow_has_the_words_that_each_client_compacts_on(stream):
    async with running(local_settings(), ScriptedUpstream([OVERFLOW])) as gateway:
        answers = {place: await gateway.post(f"/v1/{place}", {**BODIES[place], "stream": stream}) for place in CHATS}

    assert {answer.status for answer in answers.values()} == {400}
    assert answers["chat/completions"].error["code"] == answers["responses"].error["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in answers["chat/completions"].error["message"]
    assert answers["messages"].error["message"].startswith("prompt is too long: 9000 tokens > 8192 maximum")


@pytest.mark.parametrize(
    ("error", "statuses"),
    [
        (Overloaded("full", retry_after_seconds=2), (429, 529, 429)),
        (ModeUnavailable("starting", retry_after_seconds=2), (503, 529, 503)),
    ],
)
async def test_a_refusal_that_passes_says_when_to_come_back(error, statuses):
    async with running(local_settings(), ScriptedUpstream([error])) as gateway:
        answers = [await gateway.post(f"/v1/{place}", {**BODIES[place], "stream": True}) for place in CHATS]
    assert tuple(answer.status for answer in answers) == statuses
    assert {answer.headers["Retry-After"] for answer in answers} == {"2"}


async def test_st_10_an_engine_that_dies_ends_every_stream_with_its_own_error():
    broken = [Started(3, 9), TextDelta("a", 1), UpstreamGone("The engine is gone.")]
    async with running(local_settings(), ScriptedUpstream(broken)) as gateway:
        answers = {place: await gateway.post(f"/v1/{place}", {**BODIES[place], "stream": True}) for place in CHATS}

    last = {
        place: (events_of(answer)[-1][0], json.loads(events_of(answer)[-1][1])) for place, answer in answers.items()
    }
    assert last["chat/completions"][1]["error"]["code"] == "upstream_gone"
    assert not answers["chat/completions"].done
    assert (last["messages"][0], last["messages"][1]["error"]["type"]) == ("error", "api_error")
    assert last["responses"][0] == "response.failed"
    assert "message_stop" not in answers["messages"].body.decode()
    assert "response.completed" not in answers["responses"].body.decode()


# --------------------------------------------------------------------------------------------------------- heartbeats

BEATS = {"chat/completions": ": keep-alive", "messages": "event: ping", "responses": "event: response.in_progress"}


@pytest.mark.parametrize("place", CHATS)
async def test_st_04_and_st_06_silence_is_filled_in_each_api_s_way(place):
    """Before the first frame and after it. Codex counts no comments, so its beats are events with data."""
    before, within = asyncio.Event(), asyncio.Event()
    steps = [Started(3, 9), Pause(before), TextDelta("a", 1), Pause(within), *words("b")[1:]]
    async with running(local_settings(timeouts=QUICK), ScriptedUpstream(steps)) as gateway:
        body = json.dumps({**BODIES[place], "stream": True}).encode()
        async with gateway.session.post(f"{gateway.url}/v1/{place}", data=body) as response:
            seen = bytearray()
            await _read_until(response, seen, lambda: seen.decode().count(BEATS[place]) >= 2)
            before.set()
            await _read_until(response, seen, lambda: b'"a"' in seen)
            length = len(seen)
            await _read_until(response, seen, lambda: BEATS[place] in seen[length:].decode())
            within.set()
            seen += await response.read()

    for event, data in _typed_events(seen.decode()):
        if place != "chat/completions" and data != "[DONE]":
            assert json.loads(data)["type"] == event


def _typed_events(text):
    blocks = [block.split("\n") for block in text.split("\n\n")]
    pairs = [[line for line in block if line and not line.startswith(":")] for block in blocks]
    return [(pair[0].removeprefix("event: "), pair[-1].removeprefix("data: ")) for pair in pairs if pair]


async def _read_until(response, seen, condition):
    async with asyncio.timeout(10):
        while not condition():
            seen += await response.content.readany()


async def test_a_refusal_after_a_long_wait_is_still_a_status():
    """Nothing is sent while nobody has accepted the request, for as long as several heartbeats."""
    go = asyncio.Event()
    async with running(local_settings(timeouts=QUICK), ScriptedUpstream([Pause(go), OVERFLOW])) as gateway:
        task = asyncio.create_task(gateway.post("/v1/messages", {**BODIES["messages"], "stream": True}))
        since = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - since > 0.12)
        go.set()
        answer = await task
    assert answer.status == 400


async def test_an_engine_that_accepts_late_gets_its_client_kept_in_the_meantime():
    go = asyncio.Event()
    async with running(local_settings(timeouts=QUICK), ScriptedUpstream([Pause(go), *words("a")])) as gateway:
        body = json.dumps({**BODIES["messages"], "stream": True}).encode()
        async with gateway.session.post(f"{gateway.url}/v1/messages", data=body) as response:
            seen = bytearray()
            await _read_until(response, seen, lambda: b"event: ping" in seen)
            go.set()
            seen += await response.read()
    assert b"message_stop" in seen


# ---------------------------------------------------------------------------------------------------------- counting


async def test_an_03_tokens_are_counted_without_max_tokens_and_for_any_length():
    engine = Counting()
    async with running(local_settings(), engine) as gateway:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 100_000}], "tools": []}
        answer = await gateway.post("/split/v1/messages/count_tokens?beta=true", body)
    assert (answer.status, answer.json()) == (200, {"input_tokens": 7})
    assert engine.requests[0].prompt.messages[0]["content"] == "x" * 100_000


@pytest.mark.parametrize("error", [OVERFLOW, UpstreamGone("gone")])
async def test_a_failure_to_count_is_told_in_the_api_s_shape(error: GatewayError):
    class Failing(ScriptedUpstream):
        async def count_tokens(self, _request) -> int:
            raise error

    async with running(local_settings(), Failing()) as gateway:
        answer = await gateway.post("/v1/messages/count_tokens", BODIES["messages"])
    assert (answer.status, answer.json()["type"]) == (400 if error is OVERFLOW else 502, "error")


async def test_an_upstream_that_speaks_the_api_counts_itself_and_any_other_is_a_404():
    async with fake_upstream(http_answer(b'{"input_tokens":12}')) as upstream:
        target = TargetSettings(
            name="there", base_url=upstream.url, api_key="sk-up", models=("c",), dialects=("anthropic_messages",)
        )
        plain = TargetSettings(name="plain", base_url=upstream.url, models=("p",))
        async with running(local_settings(targets=(target, plain)), Counting()) as gateway:
            counted = await gateway.post("/v1/messages/count_tokens", {**BODIES["messages"], "model": "c"})
            unknown = await gateway.post("/v1/messages/count_tokens", {**BODIES["messages"], "model": "p"})

    assert (counted.status, counted.json()) == (200, {"input_tokens": 12})
    assert (unknown.status, unknown.json()["type"]) == (404, "error")
    assert [seen.path for seen in upstream.seen] == ["/v1/messages/count_tokens"]
    assert upstream.seen[0].header("x-api-key") == "sk-up"


# ------------------------------------------------------------------------------------------------------------- models


async def test_an_09_the_list_of_models_has_the_shape_that_its_reader_expects():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        plain = (await gateway.get("/models")).json()
        codex = (await gateway.get("/v1/models?client_version=0.171.0")).json()
        anthropic = (await gateway.get("/v1/models?limit=1000", headers={"anthropic-version": "2023-06-01"})).json()
        one = await gateway.get("/v1/models/scripted:split", headers={"anthropic-version": "2023-06-01"})

    ids = ["scripted", "scripted:merged", "scripted:split"]
    assert [entry["id"] for entry in plain["data"]] == [entry["id"] for entry in anthropic["data"]] == ids
    assert codex["models"] == []
    assert {"type", "id", "display_name", "created_at"} <= set(anthropic["data"][0])
    assert (anthropic["has_more"], anthropic["first_id"], anthropic["last_id"]) == (False, ids[0], ids[-1])
    assert one.json()["id"] == "scripted:split"


async def test_model_ids_may_hold_slashes_and_colons():
    listed = b'{"data":[{"id":"org/model:7b","owned_by":"them","context_length":4096}]}'
    async with fake_upstream(http_answer(listed)) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.get("/split/v1/models/org/model:7b")
    assert (answer.status, answer.json()["id"], answer.json()["context_length"]) == (200, "org/model:7b", 4096)


@pytest.mark.parametrize(
    ("place", "field"), [("chat/completions", "messages"), ("messages", "messages"), ("responses", "input")]
)
async def test_a_conversation_of_very_many_items_is_refused_before_it_is_read(place, field):
    body = {**BODIES[place], field: [{"role": "user", "content": "a"}] * 20_001}
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(f"/v1/{place}", body)
    assert answer.status == 400
    assert f"`{field}` has 20001 items" in answer.error["message"]
