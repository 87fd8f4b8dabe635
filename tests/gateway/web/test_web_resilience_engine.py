"""Who stands in for whom where the bundled engine is one of those that could answer."""

from __future__ import annotations

import pytest
from web_answers import FAST, PLAIN, error_answer, in_turn
from web_support import (
    fake_upstream,
    local_settings,
    running,
)

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import ModeUnavailable, UpstreamGone
from gateway.core.types import CacheMode, Finished, FinishReason, Started, TextDelta
from gateway.settings.schema import (
    EngineSettings,
    RetrySettings,
    RouteSettings,
    Settings,
    TargetSettings,
)
from gateway.upstreams.scripted import ScriptedUpstream, words


def split_fails(error):
    """A script by which split requests fail and merged ones are answered."""
    return lambda request: [error] if request.strategy.mode is CacheMode.SPLIT else words("hi")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "reason"), [(UpstreamGone("peer lost"), "broken"), (ModeUnavailable("starting"), "unavailable")]
)
async def test_merged_stands_in_for_split_only_where_the_settings_say_so(error, reason, stream):
    for allowed in (False, True):
        retry = RetrySettings(first_delay_seconds=0.0, merged_for_split=allowed)
        async with running(local_settings(retry=retry), ScriptedUpstream(split_fails(error))) as gateway:
            answer = await gateway.chat(model="scripted", stream=stream, headers={"X-Cache-Mode": "split"})
        if allowed:
            assert (answer.status, answer.headers["X-Cache-Mode"]) == (200, "merged")
            assert answer.headers["X-Cache-Mode-Requested"] == "split"
            assert answer.headers["X-Cache-Mode-Reason"] == f"fallback from split ({reason}); local model"
            assert "answered by merged, since split failed" in answer.headers["X-Kvgate-Notice"]
        else:
            assert answer.status in (502, 503)
            assert answer.headers["X-Cache-Mode"] == "split"


async def test_the_record_has_the_mode_of_each_attempt():
    retry = RetrySettings(merged_for_split=True)
    async with running(local_settings(retry=retry), ScriptedUpstream(split_fails(UpstreamGone("x")))) as gateway:
        answer = await gateway.chat(model="scripted", headers={"X-Cache-Mode": "split"})
        record = await gateway.record(answer)
    assert [(attempt["cache_mode"], attempt["outcome"]) for attempt in record["attempts"]] == [
        ("split", "broken"),
        ("merged", "ok"),
    ]


async def test_a_merged_request_never_becomes_a_split_one():
    retry = RetrySettings(first_delay_seconds=0.0, merged_for_split=True)
    engine = ScriptedUpstream([UpstreamGone("x")])
    async with running(local_settings(retry=retry), engine) as gateway:
        answer = await gateway.chat(model="scripted", headers={"X-Cache-Mode": "merged"})
    assert answer.status == 502
    assert {request.strategy.mode for request in engine.requests} == {CacheMode.MERGED}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_its_first_token_is_asked_again_and_not_after(stream):
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    good = [Started(1, 9), TextDelta("hi", 1), Finished(FinishReason.STOP, usage, Timings())]
    for first, num_asked in (([Started(1, 9), UpstreamGone("x")], 2), ([*good[:2], UpstreamGone("x")], 1)):
        engine = ScriptedUpstream(in_turn(first, good))
        async with running(local_settings(retry=FAST), engine) as gateway:
            answer = await gateway.chat(model="scripted", stream=stream)
        assert len(engine.requests) == num_asked
        assert (b"error" in answer.body) is (num_asked == 1)


async def test_an_upstream_stands_in_for_the_engine_and_the_engine_for_an_upstream():
    async with fake_upstream(in_turn(PLAIN, error_answer(500))) as upstream:
        settings = Settings(
            engine=EngineSettings(served_name="scripted"),
            targets=(TargetSettings(name="a", base_url=upstream.url),),
            routes=(
                RouteSettings(model="one", target="local", fallbacks=("a",)),
                RouteSettings(model="two", target="a", fallbacks=("local",)),
            ),
            retry=FAST,
        )
        engine = ScriptedUpstream(in_turn([ModeUnavailable("starting")], words("local")))
        async with running(settings, engine) as gateway:
            first = await gateway.chat(model="one")
            second = await gateway.chat(model="two")
    assert (first.status, first.headers["X-Cache-Backend"], first.headers["X-Cache-Mode"]) == (200, "a", "unknown")
    assert upstream.seen[0].json()["model"] == "one"
    assert (second.headers["X-Cache-Backend"], second.headers["X-Cache-Mode"]) == ("local", "merged")
    assert second.json()["choices"][0]["message"]["content"] == "local"
