"""What becomes of a split request when a server fails, hangs or is full, or when its client leaves."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pairs_support import CHAT, SPLIT, WHOLE, Pair, pair, said, until_state
from web_support import Answer, running

from gateway.core.types import CacheMode
from gateway.settings.schema import CacheLayoutSettings, PairSettings, RetrySettings, Settings
from support.pd_servers import PdServer, listening
from support.waiting import until, until_told

# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("engine", ["sglang", "vllm-mooncake"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("failure", "status"), [(500, 502), (503, 503), ("reset", 502), (400, 400)])
async def test_pd_01_a_failing_prefill_ends_the_decode_that_waits_for_it(engine, stream, failure, status):
    async with pair(engine) as it:
        it.p.fails = lambda got: failure
        answer = await it.ask(stream=stream)
        assert answer.status == status
        await until(lambda: it.d.num_gone == 1, "decode was left")
        assert it.d.num_blocks == 0
        if status >= 500:
            name = "kvgate_leg_failures_total"
            assert await it.gateway.metric(name, backend="pair", side="prefill") == 1


async def test_pd_01_a_hanging_prefill_has_a_deadline_of_ours():
    async with pair("sglang", prefill_timeout_seconds=0.2) as it:
        it.p.fails = lambda got: "hang"
        answer = await it.ask()
        assert answer.status == 504
        await until(lambda: it.d.num_gone == it.p.num_gone == 1, "both were left")
        await until(lambda: len(it.p.aborted) == len(it.d.aborted) == 1, "both were told")
        assert it.p.aborted == it.d.aborted == [it.p.got[0].body["rid"]]


async def test_pd_01_a_failing_decode_ends_the_prefill():
    reached = asyncio.Event()

    def pause(where: str) -> asyncio.Event:
        reached.set()
        return asyncio.Event()

    async with pair("sglang") as it:
        it.p.pause = pause
        it.d.pause = lambda where: reached if where == "start" else None
        it.d._sglang_decode = lambda got: refused()  # type: ignore[method-assign]
        answer = await it.ask()
        assert (answer.status, "decode-0 answered 500" in answer.error["message"]) == (502, True)
        await until(lambda: it.p.num_gone == 1, "prefill was left")


async def test_pd_01_a_prefill_that_fails_after_decodes_headers_still_ends_it():
    """Some servers send the headers of a stream before there is a token."""
    broken = asyncio.Event()
    async with pair("sglang") as it:
        it.p.pause = lambda where: broken if where == "start" else None
        it.d._sglang_decode = lambda got: nothing()  # type: ignore[method-assign]
        original = it.d._send

        async def early(request: Any, got: Any, extra: Any) -> Any:
            from aiohttp import web

            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            broken.set()
            await asyncio.Event().wait()
            return await original(request, got, extra)

        it.d._send = early  # type: ignore[method-assign]
        it.p._sglang_prefill = lambda got: refused()  # type: ignore[method-assign]
        answer = await it.ask(stream=True)
        assert answer.status == 502
        await until(lambda: it.d.num_gone == 1, "decode was left")


async def nothing() -> Any:
    return {}, None


async def refused() -> Any:
    return {}, (500, "KV transfer failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_a_failing_prefill_means_that_decode_is_never_asked(stream):
    async with pair("vllm") as it:
        it.p.fails = lambda got: 500
        answer = await it.ask(stream=stream)
        assert (answer.status, "prefill-0 answered 500" in answer.error["message"]) == (502, True)
        assert not it.d.got


async def test_what_prefill_refuses_goes_to_the_client_as_it_is():
    async with pair("vllm") as it:
        it.p.fails = lambda got: 422
        answer = await it.ask(stream=True)
        assert (answer.status, answer.error["message"]) == (422, "prefill says 422")
        assert not it.d.got


async def test_kv_that_could_not_be_loaded_is_an_error_and_no_answer():
    async with pair("vllm") as it:
        original = it.d._whole
        it.d._whole = lambda *parts: failed(original(*parts))  # type: ignore[method-assign]
        answer = await it.ask()
        assert (answer.status, "could not load" in answer.error["message"]) == (502, True)


def failed(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["finish_reason"] = "error"
    return answer


async def test_decode_that_goes_silent_after_the_prefill_has_a_deadline():
    async with pair("vllm", handoff_timeout_seconds=0.2) as it:
        it.d.pause = lambda where: asyncio.Event() if where == "transfer" else None
        answer = await it.ask(stream=True)
        assert answer.status == 504
        await until(lambda: it.num_blocks == (0, 0), "blocks are free")


async def test_split_is_served_merged_only_where_the_settings_say_so():
    async with pair("vllm", num_merged=1) as it:
        it.p.fails = lambda got: 500
        assert (await it.ask()).status == 502
        assert not it.merged[0].got
    async with pair("vllm", num_merged=1, retry=RetrySettings(max_attempts=2, merged_for_split=True)) as it:
        it.p.fails = lambda got: 500
        answer = await it.ask()
        assert (answer.status, answer.headers["X-Cache-Mode"]) == (200, "merged")
        assert "fallback from split" in answer.headers["X-Cache-Mode-Reason"]
        assert "split failed" in answer.headers["X-Kvgate-Notice"]


async def test_a_server_that_is_not_there_is_passed_over_and_used_again_when_it_is_back():
    async with pair("vllm", num_prefill=2, num_decode=2) as it:
        gone = it.prefill[0]
        gone.is_healthy = False
        await until_state(it, "prefill-0", "down")
        for _ in range(4):
            assert (await it.ask()).headers["X-Cache-Instance"].startswith("prefill-1 ")
        gone.is_healthy = True
        await until_state(it, "prefill-0", "up")
        served = {
            (await it.ask(messages=[{"role": "user", "content": str(i)}])).headers["X-Cache-Instance"] for i in range(8)
        }
        assert any(name.startswith("prefill-0 ") for name in served)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_refused_connection_leads_to_the_next_server_at_once(engine, side):
    async with pair(engine, num_prefill=2, num_decode=2) as it:
        await it.ask()
        server = next(s for s in getattr(it, side) if s.got)
        url = server.url
        # The same pair with an address at which nobody listens in the place of one server.
        urls = {s: tuple(x.url for x in getattr(it, s)) for s in ("prefill", "decode")}
        urls[side] = ("http://127.0.0.1:9", *(u for u in urls[side] if u != url))
        settings = Settings(pairs=(PairSettings(name="pair", engine=engine, **urls),))
        async with running(settings) as gateway:
            for _ in range(3):
                answer = await gateway.post("/v1/chat/completions", CHAT, headers=SPLIT)
                assert answer.status == 200, answer.body
                assert f"{side}-1" in answer.headers["X-Cache-Instance"]


async def test_no_server_at_all_is_said_with_a_time_to_come_back():
    settings = Settings(
        pairs=(
            PairSettings(
                name="pair",
                engine="vllm",
                prefill=("http://127.0.0.1:9",),
                decode=("http://127.0.0.1:10",),
                models=("m",),
            ),
        ),
        retry=RetrySettings(max_attempts=1),
    )
    async with running(settings) as gateway:
        async with asyncio.timeout(10):
            while (answer := await gateway.post("/v1/chat/completions", CHAT, headers=SPLIT)).status != 503:
                assert answer.status == 502
        assert int(answer.headers["Retry-After"]) >= 1


async def test_one_token_needs_no_decode_server_not_even_for_the_next_try():
    async with pair("vllm") as it, AsyncExitStack() as stack:
        it.d.is_healthy = False
        gone = await stack.enter_async_context(listening(PdServer("vllm", "prefill")))
        urls = (gone.url, it.p.url)
        settings = Settings(
            pairs=(PairSettings(name="pair", engine="vllm", prefill=urls, decode=(it.d.url,)),),
            retry=RetrySettings(max_attempts=1),
        )
        async with running(settings) as gateway:
            other = Pair(gateway, [], [], [])
            await until_state(other, "prefill-1", "up")
            await until_state(other, "decode-0", "down")
            await stack.aclose()
            for i in range(4):
                answer = await other.ask(max_tokens=1, messages=[{"role": "user", "content": str(i)}])
                assert (answer.status, answer.headers.get("X-Cache-Instance")) == (200, "prefill-1")


async def test_models_are_known_while_only_prefill_servers_are_up():
    async with pair("vllm") as it:
        it.d.is_healthy = False
        await until_state(it, "decode-0", "down")
        answer = await it.ask()
        assert (answer.status, answer.error["message"]) == (503, "No decode server of target 'pair' is up.")


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_ready_says_whether_the_default_mode_has_servers(side):
    async with pair("vllm", num_merged=1) as it:
        urls = {s: tuple(server.url for server in getattr(it, s)) for s in ("prefill", "decode", "merged")}
        layout = CacheLayoutSettings(mode=CacheMode.SPLIT)
        settings = Settings(cache_layout=layout, pairs=(PairSettings(name="pair", engine="vllm", **urls),))
        async with running(settings) as gateway:

            async def ready() -> tuple[int, bool]:
                answer = await gateway.get("/ready")
                return answer.status, answer.json()["ready"]

            assert await ready() == (200, True)
            getattr(it, side)[0].is_healthy = False
            await until_told(ready, lambda told: told == (503, False))


# -------------------------------------------------------------------------------------------------------- client leaves


async def asking_held_at(it: Pair, place: str) -> asyncio.Task[Answer]:
    """A request whose server goes no further than `place`, a side and how far that is."""
    side, _, where = place.partition(" ")
    reached, never = asyncio.Event(), asyncio.Event()

    def pause(at: str) -> asyncio.Event | None:
        if at != where:
            return None
        reached.set()
        return never

    getattr(it, side)[0].pause = pause
    asking = asyncio.create_task(it.ask(stream=True))
    async with asyncio.timeout(10):
        await reached.wait()
    return asking


PLACES = ["prefill start", "prefill computed", "decode start", "decode transfer", "decode computed", "decode piece 1"]


@pytest.mark.parametrize("place", PLACES)
async def test_pd_04_leaving_at_any_place_frees_the_blocks_of_both_sides(place):
    async with pair("vllm") as it:
        asking = await asking_held_at(it, place)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: it.num_blocks == (0, 0), "blocks are free")
        assert it.p.num_running == it.d.num_running == 0
        getattr(it, place.split()[0])[0].pause = lambda at: None
        assert said(await it.ask()) == WHOLE


@pytest.mark.parametrize("place", ["prefill start", "prefill transfer", "decode start", "decode piece 1"])
async def test_pd_04_sglang_is_told_of_a_client_that_has_left(place):
    async with pair("sglang") as it:
        asking = await asking_held_at(it, place)
        await until(lambda: it.p.got and it.d.got, "both were asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: it.num_blocks == (0, 0), "blocks are free")
        rid = it.d.got[0].body["rid"]
        await until(lambda: it.p.aborted == it.d.aborted == [rid], "both were told")


# ------------------------------------------------------------------------------------------------------------ admission


async def test_pd_02_more_requests_than_decode_can_hold_wait_here_and_none_in_the_engine():
    async with pair("sglang", changed={"decode": {"capacity": 4}}, max_running=4, max_waiting=64) as it:
        go = asyncio.Event()
        it.p.pause = lambda where: go if where == "start" else None
        asking = [asyncio.create_task(it.ask(stream=True)) for _ in range(64)]
        await until(lambda: it.d.num_running == 4, "decode is full")
        go.set()
        assert [(await task).text() for task in asking] == [WHOLE] * 64
        assert it.d.most_running == 4


async def test_pd_02_a_full_queue_is_refused_at_once_and_it_recovers():
    go = asyncio.Event()
    async with pair("sglang", max_running=4, max_waiting=8) as it:
        it.p.pause = lambda where: go if where == "start" else None
        asking = [asyncio.create_task(it.ask()) for _ in range(64)]
        await until(lambda: sum(task.done() for task in asking) == 52, "those that have no place were told")
        refused = [task.result() for task in asking if task.done()]
        assert {answer.status for answer in refused} == {429}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        go.set()
        rest = [(await task).status for task in asking]
        assert (rest.count(200), rest.count(429)) == (12, 52)
        assert (await it.ask()).status == 200
        assert it.num_blocks == (0, 0)


async def test_pd_02_the_wait_for_a_place_has_an_end():
    async with pair("sglang", max_running=1, queue_timeout_seconds=0.1) as it:
        it.p.pause = lambda where: asyncio.Event() if where == "start" else None
        first = asyncio.create_task(it.ask())
        await until(lambda: it.p.got, "one is there")
        answer = await it.ask()
        assert (answer.status, "No decode server had room" in answer.error["message"]) == (429, True)
        first.cancel()
