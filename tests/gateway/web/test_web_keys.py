"""Limits of client keys, as clients meet them: statuses, headers, shapes, and what is counted."""

from __future__ import annotations

import asyncio

import pytest
from web_support import (
    DONE,
    ROLE,
    USAGE,
    Hold,
    chunk,
    fake_upstream,
    local_settings,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.core.errors import ModeUnavailable
from gateway.core.types import CacheMode
from gateway.settings.schema import KeySettings, RetrySettings, TargetSettings
from gateway.upstreams.scripted import ScriptedUpstream, words
from support.waiting import until

GOOD = sse_answer(ROLE, chunk("a"), chunk(finish="stop"), USAGE, DONE)
HEADERS = {"Authorization": "Bearer sk-a"}
OTHER = {"x-api-key": "sk-b"}
BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}


def keys(**limits):
    return (KeySettings(key="sk-a", name="a", **limits), KeySettings(key="sk-b", name="b"))


def limited(**limits):
    return lambda url: upstream_settings(url, keys=keys(**limits))


async def test_one_request_too_many_is_a_429_that_says_when_and_what_is_left():
    async with fake_upstream(GOOD) as upstream, running(limited(requests_per_minute=2)(upstream.url)) as gateway:
        answers = [await gateway.chat(model="m", stream=True, headers=HEADERS) for _ in range(3)]
        others = await gateway.chat(model="m", stream=True, headers=OTHER)
        refusals = await gateway.metric("kvgate_key_refusals_total", key="a", reason="rate")

    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert (answers[2].error["type"], answers[2].error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 61
    assert (others.status, "x-ratelimit-limit-requests" in others.headers) == (200, False)
    assert len(upstream.seen) == 3
    assert refusals == 1


async def test_the_limits_of_the_key_beyond_do_not_stand_for_this_one_s():
    theirs = b"X-RateLimit-Remaining-Requests: 999\r\nx-ratelimit-limit-tokens: 5\r\n"
    answers = sse_answer(ROLE, chunk("a"), chunk(finish="stop"), DONE, extra=theirs)
    async with fake_upstream(answers) as upstream, running(limited(requests_per_minute=2)(upstream.url)) as gateway:
        mine = await gateway.chat(model="m", stream=True, headers=HEADERS)
        unlimited = await gateway.chat(model="m", stream=True, headers=OTHER)
    assert mine.headers.getall("x-ratelimit-remaining-requests") == ["1"]
    assert "x-ratelimit-limit-tokens" not in mine.headers
    assert unlimited.headers["x-ratelimit-remaining-requests"] == "999"


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_is_refused_in_its_own_shape(path):
    async with fake_upstream(GOOD) as upstream, running(limited(requests_per_minute=1)(upstream.url)) as gateway:
        await gateway.chat(model="m", stream=True, headers=HEADERS)
        answer = await gateway.post(path, BODIES[path], headers=HEADERS)
    assert answer.status == 429
    assert answer.error["type"] == "rate_limit_error"
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")
    assert "Retry-After" in answer.headers


async def test_tokens_are_counted_as_the_upstream_says_them():
    async with fake_upstream(GOOD) as upstream, running(limited(tokens_per_minute=45)(upstream.url)) as gateway:
        first = await gateway.chat(model="m", stream=True, headers=HEADERS)  # 10 tokens, as USAGE has it
        state = (await gateway.chat(model="m", stream=True, max_tokens=1, headers=HEADERS)).headers
        big = await gateway.chat(model="m", stream=True, max_tokens=40, headers=HEADERS)
    assert first.status == 200
    assert int(state["x-ratelimit-remaining-tokens"]) < 35
    assert (big.status, big.error["code"]) == (429, "rate_limit_exceeded")


async def test_streams_under_way_count_and_a_client_that_leaves_gives_its_place_back():
    steps = sse_answer(ROLE, chunk("a"), Hold())
    async with fake_upstream(steps) as upstream, running(limited(max_concurrent=1)(upstream.url)) as gateway:
        task = asyncio.create_task(gateway.chat(model="m", stream=True, headers=HEADERS))
        await until(lambda: upstream.seen)
        refused = await gateway.chat(model="m", stream=True, headers=HEADERS)
        task.cancel()
        await until(lambda: upstream.num_gone == 1)
        upstream.script = GOOD
        await until(lambda: len(gateway.records) == 2)
        after = await gateway.chat(model="m", stream=True, headers=HEADERS)
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert after.status == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_the_key_may_not_use_is_a_403_that_names_what_it_may(path):
    async with fake_upstream(GOOD) as upstream, running(limited(models=("small-*", "tiny"))(upstream.url)) as gateway:
        refused = await gateway.post(path, BODIES[path], headers=HEADERS)
        allowed = await gateway.chat(model="tiny", stream=True, headers=HEADERS)
        seen = len(upstream.seen)
    assert refused.status == 403
    assert "small-*, tiny" in refused.error["message"]
    assert (allowed.status, seen) == (200, 1)


async def test_a_key_sees_the_models_that_it_may_use():
    target = TargetSettings(name="t", base_url="http://127.0.0.1:9", models=("a1", "a2", "b1"))
    settings = upstream_settings("http://127.0.0.1:9", keys=keys(models=("a*",)), targets=(target,))
    async with running(settings) as gateway:
        mine = (await gateway.get("/v1/models", headers=HEADERS)).json()["data"]
        hidden = await gateway.get("/v1/models/b1", headers=HEADERS)
        theirs = (await gateway.get("/v1/models", headers=OTHER)).json()["data"]
    assert [entry["id"] for entry in mine] == ["a1", "a2"]
    assert hidden.status == 404
    assert [entry["id"] for entry in theirs] == ["a1", "a2", "b1"]


async def test_a_key_is_not_told_of_models_that_it_may_not_use():
    target = TargetSettings(name="t", base_url="http://127.0.0.1:9", models=("a1", "b1"))
    other = TargetSettings(name="u", base_url="http://127.0.0.1:9", models=("a2", "b2"))
    async with running(
        local_settings(keys=keys(models=("a*",)), targets=(target, other)), ScriptedUpstream()
    ) as gateway:
        mine = await gateway.chat(model="a9", headers=HEADERS)
        theirs = await gateway.chat(model="a9", headers=OTHER)
    assert (mine.status, theirs.status) == (404, 404)
    assert "Available: a1, a2." in mine.error["message"]
    assert "b1" in theirs.error["message"]


async def test_a_mode_that_the_key_may_not_use_is_a_403():
    settings = local_settings(keys=keys(modes=("merged",)))
    async with running(settings, ScriptedUpstream()) as gateway:
        refused = await gateway.chat(model="scripted:split", headers=HEADERS)
        allowed = await gateway.chat(model="scripted", headers=HEADERS)
    assert (refused.status, refused.error["code"]) == (403, "key_not_allowed")
    assert "It may use: merged" in refused.error["message"]
    assert allowed.status == 200


async def test_merged_does_not_stand_in_for_split_where_the_key_may_not_use_it():
    def script(request):
        return [ModeUnavailable("starting")] if request.strategy.mode is CacheMode.SPLIT else words("hi")

    two = (KeySettings(key="sk-a", name="a", modes=("split",), mode="split"), KeySettings(key="sk-b", name="b"))
    settings = local_settings(keys=two, retry=RetrySettings(merged_for_split=True))
    async with running(settings, ScriptedUpstream(script)) as gateway:
        held = await gateway.chat(model="scripted:split", headers=HEADERS)
        free = await gateway.chat(model="scripted:split", headers=OTHER)
    assert (held.status, held.headers["X-Cache-Mode"]) == (503, "split")
    assert (free.status, free.headers["X-Cache-Mode"]) == (200, "merged")


async def test_a_spent_budget_is_an_insufficient_quota_that_is_not_tried_again():
    async with fake_upstream(GOOD) as upstream, running(limited(budget_usd=0)(upstream.url)) as gateway:
        unpriced = await gateway.chat(model="m", headers=HEADERS)
    async with running(local_settings(keys=keys(budget_usd=0)), ScriptedUpstream()) as gateway:
        chat = await gateway.chat(model="scripted", headers=HEADERS)
        messages = await gateway.post("/v1/messages", BODIES["/v1/messages"] | {"model": "scripted"}, headers=HEADERS)

    assert (unpriced.status, unpriced.error["code"]) == (403, "key_not_allowed")
    assert "price_model" in unpriced.error["message"]
    assert (chat.status, chat.error["type"], chat.error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert chat.headers["X-Should-Retry"] == "false"
    assert (messages.status, messages.error["type"]) == (402, "billing_error")


async def test_a_request_that_is_refused_for_its_body_gives_its_tokens_back():
    settings = local_settings(keys=keys(tokens_per_minute=1000, max_concurrent=1))
    async with running(settings, ScriptedUpstream()) as gateway:
        for _ in range(3):
            bad = await gateway.chat(model="scripted", max_tokens=900, temperature="hot", headers=HEADERS)
            assert bad.status == 400
        good = await gateway.chat(model="scripted", max_tokens=5, headers=HEADERS)
    assert good.status == 200
