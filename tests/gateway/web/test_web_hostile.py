"""Clients and upstreams that break the rules: what they send is refused clearly, hidden or kept small."""

from __future__ import annotations

import json

import pytest
from web_support import (
    DONE,
    ROLE,
    chunk,
    fake_upstream,
    http_answer,
    local_settings,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.settings.schema import KeySettings
from gateway.upstreams.scripted import ScriptedUpstream

WHOLE = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
KEYS = (KeySettings(name="a", key="key-of-a-123"), KeySettings(name="b", key="key-of-b-123"))


@pytest.mark.parametrize("header", [b"Authorization: Bearer \xff\xfe", b"x-api-key: \xc3\xa9\xff"])
async def test_a_key_of_any_bytes_is_refused_like_any_wrong_key(header):
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        answer = await gateway.raw(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n"
        )

    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [("split", "merged", 400), ("split", "Split", 200), ("split", "", 400)],
)
async def test_a_header_that_says_two_things_is_refused(first, second, status):
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        body = b'{"messages":[{"role":"user","content":"hi"}]}'
        answer = await gateway.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"X-Cache-Mode: %s\r\nX-Cache-Mode: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (first.encode(), second.encode(), len(body), body)
        )

    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or b"X-Cache-Mode is given 2 times with different values" in answer


async def test_a_query_that_says_two_things_is_refused():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(path="/v1/chat/completions?cache_mode=split&cache_mode=merged")

    assert answer.status == 400
    assert answer.error["param"] == "query cache_mode"


async def test_a_huge_name_is_neither_repeated_nor_kept_whole():
    async with running(local_settings(), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(model="x" * 1_000_000)
        record = await gateway.record(answer)

    assert answer.status == 404
    assert len(answer.body) < 1000
    assert len(record["model"]) < 300


async def test_a_record_is_shown_only_to_the_key_it_belongs_to():
    async with running(local_settings(keys=KEYS), ScriptedUpstream()) as gateway:
        answer = await gateway.chat(headers={"x-api-key": "key-of-a-123"})
        path = f"/v1/requests/{answer.headers['X-Request-Id']}"
        statuses = [(await gateway.get(path, headers={"x-api-key": f"key-of-{name}-123"})).status for name in "ab"]

    assert statuses == [200, 404]


# --------------------------------------------------------------------------------------------------------- upstreams


@pytest.mark.parametrize("stream", [True, False])
async def test_a_body_that_ends_too_early_is_a_failure_even_without_a_length(stream):
    cut = json.dumps(WHOLE).encode()[:40]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    async with fake_upstream([head + cut]) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=stream)
        record = await gateway.record(answer)

    assert answer.status == 502
    assert answer.error["code"] == "upstream_gone"
    assert record["outcome"] == "error"


async def test_a_stream_of_nothing_but_done_is_a_failure():
    async with fake_upstream(sse_answer(DONE)) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)

    assert answer.status == 502
    assert answer.error["code"] == "upstream_gone"


async def test_an_error_event_that_is_no_json_is_told_in_our_words():
    steps = sse_answer(ROLE, chunk("a"), b"event: error\ndata: boom\n\n")
    async with fake_upstream(steps) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m", stream=True)

    assert answer.text() == "a"
    assert answer.chunks()[-1]["error"]["type"] == "upstream_error"
    assert not answer.done


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect"])
async def test_a_redirect_is_not_followed_and_says_so(status):
    answer_there = http_answer(b"", status=status, extra="Location: http://127.0.0.1:1/\r\n")
    async with fake_upstream(answer_there) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")

    assert answer.status == 502
    assert f"answered {status[:3]}, a redirect" in answer.error["message"]


async def test_a_status_that_no_client_knows_becomes_a_502():
    async with (
        fake_upstream(http_answer(b"x", status="999 Odd")) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        answer = await gateway.chat(model="m")

    assert answer.status == 502
    assert "999" in answer.error["message"]


@pytest.mark.parametrize("status", ["401 Unauthorized", "200 OK"])
async def test_au_03_an_upstream_that_quotes_its_key_does_not_tell_it_to_the_client(status):
    key = "sk-of-the-upstream-1"
    body = json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}}).encode()
    cut_in_two = [b"HTTP/1.1 " + status.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body)]
    cut_in_two += [body[:50], body[50:]]
    async with (
        fake_upstream(cut_in_two) as upstream,
        running(upstream_settings(upstream.url, server={"api_key": key})) as gateway,
    ):
        answer = await gateway.chat(model="m")

    assert answer.status in (401, 502)
    assert upstream.seen[0].header("Authorization") == f"Bearer {key}"
    assert "Incorrect API key provided: ***" in answer.error["message"]


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": -5, "completion_tokens": 3}, {"prompt_tokens": 5, "completion_tokens": 10**30}]
)
async def test_token_counts_that_no_server_can_mean_are_not_counted(usage):
    body = json.dumps({**WHOLE, "usage": usage}).encode()
    async with fake_upstream(http_answer(body)) as upstream, running(upstream_settings(upstream.url)) as gateway:
        answer = await gateway.chat(model="m")
        record = await gateway.record(answer)

    assert answer.body == body
    assert "completion_tokens" not in record["timings"]
