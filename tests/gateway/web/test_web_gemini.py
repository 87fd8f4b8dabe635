"""Gemini's API over the whole application: places with a verb, both kinds of stream, keys, models, upstreams."""

from __future__ import annotations

import asyncio
import json

import pytest
from google import genai
from google.genai import types
from web_answers import HELLO
from web_support import (
    DONE,
    ROLE,
    USAGE,
    Reset,
    chunk,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    sse_answer,
    upstream_settings,
)

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import ContextLengthExceeded, Overloaded, UpstreamGone
from gateway.core.types import ChoiceFinished, Finished, FinishReason, Started, TextDelta, ToolCallDelta
from gateway.service import Body
from gateway.settings.schema import KeySettings, TimeoutSettings
from gateway.upstreams.scripted import Pause, ScriptedUpstream
from gateway.web.paths import Place, find

BODY = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
PREFIXES = ("", "/v1beta", "/v1", "/api", "/api/v1", "/v1/v1")
QUICK = TimeoutSettings(heartbeat_seconds=0.05)
KEYED = local_settings(keys=(KeySettings(key="sk-a", name="a"),))
SSE = "/v1beta/models/scripted:streamGenerateContent?alt=sse"
ARRAY = "/v1beta/models/scripted:streamGenerateContent"
WHOLE = "/v1beta/models/scripted:generateContent"


class Counting(ScriptedUpstream):
    """An engine that knows how long a prompt is."""

    async def count_tokens(self, request) -> int:
        self.requests.append(request)
        return 7


def text_of(responses):
    parts = [part for said in responses for part in said["candidates"][0]["content"]["parts"]]
    return "".join(part.get("text", "") for part in parts)


def frames_of(body):
    """Every line of an event stream must be a frame of data, or blank."""
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith(b"data: {") for line in lines), lines
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


# ------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1beta/models/m:generateContent", Place("models/*:generateContent", None, "m", True)),
        ("/models/m:countTokens", Place("models/*:countTokens", None, "m", True)),
        ("/split/v1beta/models/m:split:generateContent", Place("models/*:generateContent", "split", "m:split", True)),
        ("/v1/models/org/m:streamGenerateContent/", Place("models/*:streamGenerateContent", None, "org/m", True)),
        ("/v1beta/models", Place("models", None, "", True)),
        ("/v1beta/models/m:split", Place("models/*", None, "m:split", True)),
        ("/v1/models/m:split", Place("models/*", None, "m:split")),
        ("/v1beta/models/m:embedContent", Place("models/*:embedContent", None, "m", True)),
        ("/v1beta/chat/completions", None),
        ("/v1beta", None),
        ("/v1beta/v1/models", None),
    ],
)
def test_where_a_path_leads(path, place):
    assert find(path) == place


async def test_ht_14_every_verb_is_served_under_every_prefix_and_mode():
    engine = Counting()
    async with running(local_settings(), engine) as gateway:
        for mode in ("", "/merged", "/split"):
            for prefix in PREFIXES:
                base = f"{mode}{prefix}/models/scripted"
                whole = await gateway.post(f"{base}:generateContent", BODY)
                events = await gateway.post(f"{base}:streamGenerateContent?alt=sse", BODY)
                array = await gateway.post(f"{base}:streamGenerateContent", BODY)
                count = await gateway.post(f"{base}:countTokens", BODY)

                assert text_of([whole.json()]) == text_of(frames_of(events.body)) == text_of(array.json())
                assert text_of([whole.json()]) == "Hello world"
                assert count.json() == {"totalTokens": 7}
                for answer in (whole, events, array):
                    assert answer.headers["X-Cache-Mode"] == (mode.lstrip("/") or "merged")
    assert {request.model for request in engine.requests} == {"scripted", ""}


async def test_the_last_colon_parts_model_and_verb_and_the_path_wins_over_the_body():
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        body = BODY | {"model": "models/other", "stream": True}
        answer = await gateway.post("/v1beta/models/scripted:split:generateContent", body)

    assert (answer.status, answer.headers["X-Cache-Mode"], answer.headers["X-Cache-Mode-Source"]) == (
        200,
        "split",
        "model",
    )
    assert (engine.requests[0].model, engine.requests[0].stream) == ("scripted", False)
    assert answer.json()["modelVersion"] == "scripted"


def test_fields_of_a_path_win_over_the_bodys_own():
    body = Body(b'{"model": 1, "x": 2}', {"model": "m", "stream": True})
    assert body.values(without=frozenset()) == {"model": "m", "x": 2, "stream": True}


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("GET", WHOLE, 405, "INVALID_ARGUMENT"),
        ("POST", "/v1beta/models/scripted:embedContent", 404, "NOT_FOUND"),
        ("POST", "/v1beta/models/nosuch:generateContent", 404, "NOT_FOUND"),
        ("POST", "/v1beta/models/:generateContent", 405, "INVALID_ARGUMENT"),
        ("POST", f"{ARRAY}?alt=xml", 400, "INVALID_ARGUMENT"),
        ("POST", "/v1beta/models/scripted", 405, "INVALID_ARGUMENT"),
        ("GET", "/v1beta/models/nosuch", 404, "NOT_FOUND"),
        ("GET", "/v1beta/cachedContents", 404, "NOT_FOUND"),
    ],
)
async def test_what_is_not_served_is_said_in_that_apis_shape(method, path, status, name):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.call(method, path, BODY if method == "POST" else None)
    assert (answer.status, answer.error["code"], answer.error["status"]) == (status, status, name)


async def test_the_channel_of_a_bad_mode_is_told_in_that_apis_shape():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.post(WHOLE, BODY | {"cache_mode": "spilt"})
    assert answer.status == 400
    assert "cache_mode" in answer.error["message"]


# --------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-goog-api-key": "sk-a"}, 200),
        ({"Authorization": "Bearer sk-a"}, 200),
        ({"x-goog-api-key": "x"}, 401),
        ({}, 401),
    ],
)
async def test_au_04_the_key_comes_in_the_apis_own_header_or_as_a_bearer(headers, status):
    async with running(KEYED, Counting()) as gateway:
        for path in (WHOLE, SSE, "/v1beta/models/scripted:countTokens"):
            answer = await gateway.post(path, BODY, headers=headers)
            assert answer.status == status
        listed = await gateway.get("/v1beta/models", headers=headers)
    assert listed.status == status
    if status == 401:
        assert answer.error["status"] == "UNAUTHENTICATED"


@pytest.mark.parametrize("settings", [KEYED, local_settings()])
async def test_a_key_in_a_url_is_refused_and_the_header_named(settings):
    async with running(settings, ScriptedUpstream()) as gateway:
        answer = await gateway.post(f"{WHOLE}?key=sk-a", BODY)
    assert (answer.status, answer.error["status"]) == (401, "UNAUTHENTICATED")
    assert "x-goog-api-key" in answer.error["message"]
    assert "sk-a" not in answer.body.decode()


# ------------------------------------------------------------------------------------------------------------- models


async def test_models_in_that_apis_shape_by_path_or_by_the_clients_headers():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        by_path = await gateway.get("/split/v1beta/models?pageSize=5")
        by_header = await gateway.get("/v1/models", headers={"x-goog-api-key": "any"})
        one = await gateway.get("/v1beta/models/scripted:split")
        others = await gateway.get("/v1/models")

    assert by_path.json() == by_header.json()
    assert [entry["name"] for entry in by_path.json()["models"]] == [
        "models/scripted",
        "models/scripted:merged",
        "models/scripted:split",
    ]
    assert one.json() == by_path.json()["models"][2]
    assert (one.json()["inputTokenLimit"], one.json()["modes"]) == (8192, ["split"])
    assert "generateContent" in one.json()["supportedGenerationMethods"]
    assert others.json()["object"] == "list"


# ------------------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("path", [SSE, ARRAY])
async def test_st_20_silence_is_broken_by_blanks_and_the_stream_stays_readable(path):
    go = asyncio.Event()
    script = [Started(3, 100), TextDelta("a", 1), Pause(go), TextDelta("b", 1)]
    script += [Finished(FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=2), Timings())]
    async with running(local_settings(timeouts=QUICK), ScriptedUpstream(script)) as gateway:
        seen = b""
        async with gateway.session.post(gateway.url + path, json=BODY) as response:
            async for data in response.content.iter_any():
                seen += data
                if seen.endswith(b"\n\n\n\n") or (path == ARRAY and seen.endswith(b"}\n\n")):
                    go.set()
    assert go.is_set()
    assert text_of(frames_of(seen) if path == SSE else json.loads(seen)) == "ab"


async def test_no_comment_with_timings_stands_in_its_streams():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        events, array = await gateway.post(SSE, BODY), await gateway.post(ARRAY, BODY)

    assert b"kvgate" not in events.body + array.body
    assert events.headers["Content-Type"].startswith("text/event-stream")
    assert array.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (Overloaded("Full.", retry_after_seconds=2), 429, "RESOURCE_EXHAUSTED"),
        (
            ContextLengthExceeded("maximum context length is 5 tokens; your prompt has 9 tokens"),
            400,
            "INVALID_ARGUMENT",
        ),
    ],
)
@pytest.mark.parametrize("path", [SSE, ARRAY, WHOLE])
async def test_st_13_a_refusal_before_the_first_text_is_plain_http(path, error, status, name):
    async with running(local_settings(), ScriptedUpstream([error])) as gateway:
        answer = await gateway.post(path, BODY)
    assert (answer.status, answer.error["status"]) == (status, name)
    if status == 429:
        assert answer.headers["Retry-After"] == "2"
        assert {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "2s"} in answer.error["details"]
    else:
        assert "input token count (9) exceeds the maximum" in answer.error["message"]


@pytest.mark.parametrize("path", [SSE, ARRAY])
async def test_st_10_a_broken_stream_ends_with_the_apis_own_error(path):
    script = [Started(3, 100), TextDelta("a", 1), UpstreamGone("The engine died.")]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        answer = await gateway.post(path, BODY)

    last = json.loads(answer.body.strip().split(b"\n")[-1]) if path == SSE else answer.json()[-1]
    assert answer.status == 200
    assert (last["error"]["code"], last["error"]["message"]) == (502, "The engine died.")
    assert b"finishReason" not in answer.body


async def test_a_call_of_the_local_engine_reaches_the_client_whole():
    script = [Started(3, 100), ToolCallDelta(0, 0, "c1", "f", '{"a"'), ToolCallDelta(0, 0, "c1", "", ": 1}")]
    script += [Finished(FinishReason.TOOL_CALLS, Usage(prompt_tokens=3, completion_tokens=2), Timings())]
    async with running(local_settings(), ScriptedUpstream(script)) as gateway:
        for path in (SSE, ARRAY, WHOLE):
            body = (await gateway.post(path, BODY)).body
            responses = frames_of(body) if path == SSE else json.loads(body)
            first = (responses if isinstance(responses, list) else [responses])[0]
            part = first["candidates"][0]["content"]["parts"][0]
            assert part == {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}


async def test_several_candidates_are_answered():
    script = [Started(3, 100), TextDelta("a", 1, 0), TextDelta("b", 1, 1), ChoiceFinished(1, FinishReason.LENGTH)]
    script += [Finished(FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=2), Timings())]
    engine = ScriptedUpstream(script)
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.post(WHOLE, BODY | {"generationConfig": {"candidateCount": 2}})
    assert engine.requests[0].sampling.n == 2
    candidates = answer.json()["candidates"]
    assert [said["content"]["parts"] for said in candidates] == [[{"text": "a"}], [{"text": "b"}]]
    assert [said["finishReason"] for said in candidates] == ["STOP", "MAX_TOKENS"]


# ---------------------------------------------------------------------------------------------------------- upstreams

GOOD = HELLO + USAGE + DONE
OTHER = "/v1beta/models/m:{}"


@pytest.mark.parametrize("verb", ["streamGenerateContent?alt=sse", "streamGenerateContent", "generateContent"])
async def test_an_upstream_that_speaks_chat_answers_a_client_of_this_api(verb):
    whole = {"choices": [{"index": 0, "message": {"content": "平台"}, "finish_reason": "stop"}]}
    whole |= {"usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}}
    stream = verb.startswith("stream")
    script = sse_answer(GOOD) if stream else http_answer(json.dumps(whole).encode())
    body = BODY | {"generationConfig": {"maxOutputTokens": 9, "topK": 64}}
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post(OTHER.format(verb), body, headers={"x-goog-api-key": "local"})

    asked = next(seen for seen in upstream.seen if seen.method == "POST")
    assert asked.path.endswith("/chat/completions")
    assert {key: value for key, value in asked.json().items() if key != "stream_options"} == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "stream": stream,
    }
    responses = frames_of(answer.body) if "sse" in verb else answer.json() if stream else [answer.json()]
    assert text_of(responses) == "平台"
    assert responses[-1]["usageMetadata"] == {
        "promptTokenCount": 7,
        "candidatesTokenCount": 3,
        "totalTokenCount": 10,
        "cachedContentTokenCount": 4,
    }
    assert "generationConfig.topK" in answer.headers["X-Kvgate-Notice"]


async def test_au_06_the_clients_key_never_goes_to_the_upstream():
    keys, key = (KeySettings(key="sk-a", name="a"),), {"x-goog-api-key": "sk-a"}
    async with fake_upstream(sse_answer(GOOD)) as upstream:
        settings = upstream_settings(upstream.url, server={"api_key": "sk-up"}, keys=keys)
        async with running(settings) as gateway:
            answer = await gateway.post(OTHER.format("streamGenerateContent?alt=sse"), BODY, headers=key)

    assert answer.status == 200
    assert "sk-a" not in str([seen.headers for seen in upstream.seen])
    assert upstream.seen[-1].header("Authorization") == "Bearer sk-up"


async def test_st_10_an_upstream_that_breaks_ends_the_stream_with_an_error():
    script = sse_answer(ROLE + chunk("a"), Reset())
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post(OTHER.format("streamGenerateContent"), BODY)
    assert answer.json()[-1]["error"]["status"] == "UNAVAILABLE"


async def test_an_upstream_that_cannot_count_is_said():
    async with fake_upstream([]) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.post(OTHER.format("countTokens"), BODY)
    assert (answer.status, answer.error["status"]) == (404, "NOT_FOUND")


# ------------------------------------------------------------------------------------------------------ the real client


def ask_everything(url):
    """What Google's package reads of a whole answer, a stream, a count, the list of models and one of them."""
    options = types.HttpOptions(base_url=url, headers={"X-Cache-Mode": "split"})
    with genai.Client(api_key="sk-a", vertexai=False, http_options=options) as client:
        whole = client.models.generate_content(model="scripted", contents="hi").text
        pieces = [said.text or "" for said in client.models.generate_content_stream(model="scripted", contents="hi")]
        counted = client.models.count_tokens(model="scripted", contents="hi").total_tokens
        listed = [entry.name for entry in client.models.list()]
        one = client.models.get(model="scripted")
    return whole, "".join(pieces), counted, listed[0], (one.name, one.input_token_limit)


async def test_googles_own_client_is_served(monkeypatch):
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    engine = Counting()
    async with running(KEYED, engine) as gateway:
        read = await asyncio.to_thread(ask_everything, gateway.url)

    assert read == ("Hello world", "Hello world", 7, "models/scripted", ("models/scripted", 8192))
    assert {request.strategy.mode.value for request in engine.requests} == {"split"}
