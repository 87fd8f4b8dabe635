"""The bundled engine as an upstream, over real processes of the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import get_args

import pytest

from backends.protocol.messages import (
    Accepted,
    CacheParams,
    Done,
    Failed,
    FailureCode,
    FinishReason,
    Timings,
    TokenChunk,
    Usage,
)
from gateway.core import types
from gateway.core.errors import ContextLengthExceeded, InvalidRequest, ModeUnavailable, Overloaded, UpstreamTimeout
from gateway.core.types import CacheMode, CacheStrategy, Finished, Started, StrategySource, TextDelta
from gateway.upstreams.engine.availability import TAKER_OF_MODE
from gateway.upstreams.engine.messages import ERROR_OF_CODE, events_of, generate_message
from gateway.upstreams.engine.supervisor import InstanceState
from gateway.upstreams.engine.upstream import EngineUpstream
from support.engine_upstream import (
    DEADLINE_SECONDS,
    blocks_in_use,
    endless,
    make_request,
    read_text,
    report,
    running_upstream,
    start_reading,
    until_no_blocks_in_use,
)

MODES = list(CacheMode)


@pytest.fixture
async def upstream() -> AsyncIterator[EngineUpstream]:
    async with running_upstream("tokens=200,delay=0.002") as running:
        yield running


def expected(text: str, num_words: int) -> str:
    words = text.split()
    return "".join(words[i % len(words)] + " " for i in range(num_words))


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_is_started_then_text_then_finished(upstream: EngineUpstream, mode: CacheMode):
    request = make_request(mode, "one two three", max_tokens=4)
    events = [event async for event in upstream.stream(request)]

    served_by = TAKER_OF_MODE[mode]
    assert events[0] == Started(3, 4, instance=served_by, instance_reason="only instance")
    assert [event.text for event in events[1:-1] if isinstance(event, TextDelta)] == ["one ", "two ", "three ", "one "]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == ("length", 4)


@pytest.mark.parametrize("mode", MODES)
async def test_of_eight_streams_one_leaves_and_the_others_finish_right(upstream: EngineUpstream, mode: CacheMode):
    texts = [f"first{i} second{i} third{i}" for i in range(8)]
    tasks = [await start_reading(upstream, make_request(mode, text, max_tokens=100)) for text in texts]
    assert any((await blocks_in_use(upstream)).values())
    tasks[3].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(answers[3], asyncio.CancelledError)
    del answers[3], texts[3]
    assert answers == [expected(text, 100) for text in texts]
    await until_no_blocks_in_use(upstream)
    stats = await upstream.stats()
    assert all(figures.num_running == figures.num_waiting == 0 for figures in stats.values())
    assert set(stats) == {"merged", "decode", "prefill"}


@pytest.mark.parametrize("mode", MODES)
async def test_closing_a_stream_before_its_first_event_leaves_nothing(upstream: EngineUpstream, mode: CacheMode):
    async with aclosing(upstream.stream(endless(mode))) as events:
        assert isinstance(await anext(events), Started)

    await until_no_blocks_in_use(upstream)


@pytest.mark.parametrize("mode", MODES)
async def test_a_queued_request_that_is_closed_is_never_run(mode: CacheMode):
    async with running_upstream("delay=0.002", merged_max_batch=1, decode_max_batch=1) as upstream:
        running = await start_reading(upstream, endless(mode))
        async with aclosing(upstream.stream(endless(mode))) as queued:
            assert isinstance(await anext(queued), Started)
        running.cancel()
        await asyncio.wait([running])
        await until_no_blocks_in_use(upstream)

        assert await read_text(upstream, make_request(mode, "after", max_tokens=1)) == "after "


async def test_a_request_of_which_the_client_leaves_at_once_is_taken_back(upstream: EngineUpstream):
    """The task is cancelled before the engine has said anything: it may still be encoding."""
    task = asyncio.create_task(read_text(upstream, endless(CacheMode.MERGED, "word " * 1000)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    await until_no_blocks_in_use(upstream)


async def test_wrong_requests_are_refused_by_name_and_harm_nothing(upstream: EngineUpstream):
    with pytest.raises(InvalidRequest) as caught:
        await read_text(upstream, make_request(CacheMode.MERGED, temperature=9.0))
    assert caught.value.param == "temperature"
    with pytest.raises(ContextLengthExceeded, match="maximum context length is"):
        await read_text(upstream, make_request(CacheMode.SPLIT, "word " * 8192))

    assert await read_text(upstream, make_request(CacheMode.MERGED, "fine", max_tokens=1)) == "fine "


async def test_what_is_clamped_is_said_with_the_first_event(upstream: EngineUpstream):
    async with aclosing(upstream.stream(make_request(CacheMode.MERGED, max_tokens=32000))) as events:
        started = await anext(events)

    assert isinstance(started, Started)
    assert started.max_tokens == 8192 - 3
    assert started.notices == ("max_tokens 32000 exceeds the context; using 8189",)


async def test_a_full_queue_is_told_as_overload_with_the_time_to_come_back():
    async with running_upstream(
        "delay=0.002", modes=(CacheMode.MERGED,), merged_max_batch=1, max_waiting=0
    ) as upstream:
        running = await start_reading(upstream, endless(CacheMode.MERGED))
        with pytest.raises(Overloaded) as caught:
            await read_text(upstream, make_request(CacheMode.MERGED))
        running.cancel()

    assert caught.value.retry_after_seconds is not None


async def test_a_deadline_ends_a_stream(upstream: EngineUpstream):
    request = endless(CacheMode.MERGED)
    hurried = types.ChatRequest(
        request_id=request.request_id,
        model=request.model,
        prompt=request.prompt,
        sampling=request.sampling,
        strategy=request.strategy,
        stream=True,
        deadline_seconds=0.05,
    )
    with pytest.raises(UpstreamTimeout):
        await asyncio.wait_for(read_text(upstream, hurried), DEADLINE_SECONDS)


async def test_new_peaks_start_at_what_is_in_use(upstream: EngineUpstream):
    await read_text(upstream, make_request(CacheMode.MERGED, max_tokens=40))
    assert (await upstream.stats())["merged"].peak_blocks_in_use > 0

    assert (await upstream.reset_peaks(clear_prefix_cache=True))["merged"].peak_blocks_in_use == 0


async def test_models_and_modes_tell_what_is_configured_and_what_can_be_served():
    async with running_upstream("start_delay=30", modes=(CacheMode.MERGED,), wait_ready=False) as starting:
        assert starting.models()[0].modes == (CacheMode.MERGED,)
        assert starting.modes() == ()
        with pytest.raises(ModeUnavailable, match="merged is starting") as caught:
            await read_text(starting, make_request(CacheMode.MERGED))
        assert caught.value.retry_after_seconds is not None
        with pytest.raises(ModeUnavailable, match="not enabled"):
            await read_text(starting, make_request(CacheMode.SPLIT))


async def test_every_instance_is_reported_when_ready(upstream: EngineUpstream):
    reports = upstream.ready_state()

    assert {item.role: item.state for item in reports} == dict.fromkeys(
        ["merged", "decode", "prefill"], InstanceState.READY
    )
    assert all(item.info is not None and item.info.pid == item.pid and item.reason == "" for item in reports)
    assert upstream.modes() == (CacheMode.MERGED, CacheMode.SPLIT)
    assert upstream.models()[0].max_model_len == 8192


async def test_a_start_that_fails_is_reported_with_its_reason_and_not_repeated():
    async with running_upstream("start_error=no_weights_here", modes=(CacheMode.MERGED,), wait_ready=False) as upstream:
        with pytest.raises(ModeUnavailable, match="no weights here") as caught:
            await asyncio.wait_for(upstream.wait_ready(), DEADLINE_SECONDS)

        assert caught.value.retry_after_seconds is None
        assert (report(upstream, "merged").state, report(upstream, "merged").num_restarts) == ("failed", 0)


def test_every_failure_code_has_an_error():
    assert set(ERROR_OF_CODE) == set(get_args(FailureCode))


def test_held_back_text_of_the_end_comes_before_the_finish():
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    done = Done(request_id="r", finish_reason="stop", usage=usage, timings=Timings(), text="rest", stop_reason="x")

    assert events_of(done) == [TextDelta("rest", 0), Finished(types.FinishReason.STOP, usage, Timings(), "x")]
    assert events_of(Accepted(request_id="r", prompt_tokens=1, max_tokens=2)) == [Started(1, 2)]
    assert events_of(TokenChunk(request_id="r", text="", token_ids=[1, 2])) == [TextDelta("", 2)]
    with pytest.raises(InvalidRequest):
        events_of(Failed(request_id="r", code="invalid_request", message="no"))


def test_every_engine_finish_reason_is_one_of_the_domain():
    assert set(get_args(FinishReason)) <= {reason.value for reason in types.FinishReason}


def test_the_strategy_travels_with_the_request():
    strategy = CacheStrategy(
        CacheMode.SPLIT,
        StrategySource.BODY,
        chunk_size=64,
        kv_cache_dtype="fp32",
        enable_prefix_cache=False,
        transfer_mode="request",
        cache_salt="s",
    )
    request = make_request(CacheMode.SPLIT)
    message = generate_message(
        types.ChatRequest(
            request.request_id, "m", request.prompt, request.sampling, strategy, stream=False, deadline_seconds=3.0
        )
    )

    assert message.cache == CacheParams(
        chunk_size=64, kv_cache_dtype="fp32", enable_prefix_cache=False, cache_salt="s", transfer_mode="request"
    )
    assert message.deadline_seconds == 3.0
