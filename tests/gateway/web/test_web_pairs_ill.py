"""A server of a pair that fails requests while it says that it is healthy: left alone, shown, and tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pairs_support import SPLIT, TEXT_BODY, WHOLE, Pair, pair, said, until_checked, until_state

from gateway.settings.schema import RetrySettings
from support.waiting import until, until_told

FAILURES = ["reset", 500, 503]
NEVER = 600.0  # seconds: not within a test


def side_of(it: Pair, side: str) -> list[Any]:
    servers: list[Any] = getattr(it, side)
    return servers


async def asked(it: Pair, number: int, **fields: Any) -> list[int]:
    """Statuses of requests of which no two have a prefix in common, so that all servers get some."""
    return [
        (await it.ask(messages=[{"role": "user", "content": f"{i} " * 400}], **fields)).status for i in range(number)
    ]


async def breakers(it: Pair) -> dict[str, str]:
    return {server["name"]: server["breaker"] for server in (await it.state())["servers"]}


async def until_breaker(it: Pair, name: str, state: str) -> None:
    await until_told(lambda: breakers(it), lambda told: told[name] == state)


def num_of(side: str) -> dict[str, int]:
    return {"num_merged": 2, "num_prefill": 0, "num_decode": 0} if side == "merged" else {f"num_{side}": 2}


def headers_of(side: str) -> dict[str, str]:
    return {"X-Cache-Mode": "merged"} if side == "merged" else SPLIT


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode", "merged"])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
async def test_an_ill_server_is_left_alone_and_the_others_go_on(engine, side, failure):
    async with pair(engine, breaker_failures=2, breaker_seconds=NEVER, **num_of(side)) as it:
        ill = side_of(it, side)[0]
        ill.fails = lambda got: failure
        statuses = await asked(it, 16, headers=headers_of(side))
        before = len(ill.got)
        assert await asked(it, 6, headers=headers_of(side)) == [200] * 6
        assert len(ill.got) == before
        assert 2 <= sum(status != 200 for status in statuses) <= 4
        others = {name: state for name, state in (await breakers(it)).items() if name != f"{side}-0"}
        assert (await breakers(it))[f"{side}-0"] == "open"
        assert set(others.values()) == {"closed"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_what_stands_for_it_in_the_pages_and_the_metrics(engine):
    async with pair(engine, num_decode=2, breaker_failures=1, breaker_seconds=NEVER) as it:
        it.d.fails = lambda got: "reset"
        await asked(it, 4)
        name = "kvgate_server_breaker_state"
        await it.gateway.get("/metrics")
        levels = [await it.gateway.metric(name, backend="pair", server=f"decode-{i}") for i in (0, 1)]
        page = (await it.gateway.get("/v1/engines")).json()["upstreams"]["pair"]["servers"]
        ill = next(server for server in page if server["name"] == "decode-0")
        assert levels == [2, 0]
        assert (ill["state"], ill["breaker"], ill["failures"], ill["last_failure"]) == ("up", "open", 1, "broken")
        assert 0 < ill["retry_in_seconds"] <= NEVER
        assert (await it.gateway.get("/ready")).status == 503  # merged is the default, and the pair has no such servers


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_only_one_of_its_side_is_refused_quickly_with_a_time_to_come_back(engine, side):
    async with pair(engine, breaker_failures=2, breaker_seconds=NEVER) as it:
        ill = side_of(it, side)[0]
        ill.fails = lambda got: "reset"
        assert await asked(it, 2) == [502, 502]
        ill.got.clear()
        answer = await it.ask()
        assert (answer.status, answer.error["code"], ill.got) == (503, "target_unavailable", [])
        assert f"{side}-0 has failed several times in a row (broken)" in answer.error["message"]
        assert 0 < int(answer.headers["Retry-After"]) <= NEVER
        assert not any(server.num_running for server in (*it.prefill, *it.decode))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode", "merged"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_one_good_request_brings_it_back(engine, side, stream):
    async with pair(engine, breaker_failures=1, breaker_seconds=0.05, **num_of(side)) as it:
        ill, how = side_of(it, side)[0], headers_of(side)
        ill.fails = lambda got: "reset"
        await asked(it, 4, headers=how)
        await until_breaker(it, f"{side}-0", "half_open")
        ill.fails = lambda got: None
        ill.got.clear()
        answer = await it.ask(headers=how, stream=stream)
        assert (answer.text() if stream else said(answer)) == WHOLE
        assert len(ill.got) == 1
        await until_breaker(it, f"{side}-0", "closed")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_trial_whose_client_leaves_gives_way_to_the_next(engine, side):
    reached = asyncio.Event()

    def hold(where: str) -> asyncio.Event | None:
        if where == "start":
            reached.set()
            return asyncio.Event()
        return None

    async with pair(engine, breaker_failures=1, breaker_seconds=0.05, **num_of(side)) as it:
        ill = side_of(it, side)[0]
        ill.fails = lambda got: "reset"
        await asked(it, 4)
        await until_breaker(it, f"{side}-0", "half_open")
        ill.fails, ill.pause = (lambda got: None), hold
        trial = asyncio.create_task(it.ask())
        await reached.wait()
        assert await asked(it, 2) == [200, 200]  # by the others
        trial.cancel()
        await until(lambda: ill.num_running == 0, "the trial has gone")
        ill.pause, before = (lambda where: None), len(ill.got)
        async with asyncio.timeout(10):
            while len(ill.got) == before:
                assert (await it.ask()).status == 200
        await until_breaker(it, f"{side}-0", "closed")


@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize("side", ["prefill", "decode", "merged"])
async def test_refusals_never_count(side, status):
    how = {"num_merged": 1} if side == "merged" else {}
    async with pair("vllm", breaker_failures=1, breaker_seconds=NEVER, **how) as it:
        side_of(it, side)[0].fails = lambda got: status
        assert await asked(it, 5, headers=headers_of(side)) == [status] * 5
        assert set((await breakers(it)).values()) == {"closed"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_clients_that_leave_never_count(engine):
    async with pair(engine, breaker_failures=1, breaker_seconds=NEVER) as it:
        for server in (it.p, it.d):
            server.pause = lambda where: asyncio.Event() if where == "computed" else None
            server.got.clear()
            asking = asyncio.create_task(it.ask(stream=True))
            await until(lambda it=it: it.p.got and (engine == "vllm" or it.d.got), "it is there")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: it.p.num_running == it.d.num_running == 0, "and gone")
            server.pause = lambda where: None
        assert set((await breakers(it)).values()) == {"closed"}
        assert (await it.ask()).status == 200


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_hung_server_is_known_by_its_deadline_and_takes_no_other_with_it(engine, side):
    limits = {"prefill_timeout_seconds": 0.2, "handoff_timeout_seconds": 0.2}
    numbers = {"num_prefill": 2, "num_decode": 2}
    async with pair(engine, breaker_failures=1, breaker_seconds=NEVER, **numbers, **limits) as it:
        side_of(it, side)[0].fails = lambda got: "hang"
        await asked(it, 16, stream=True)
        states = await breakers(it)
        assert states.pop(f"{side}-0") == "open"
        assert set(states.values()) == {"closed"}
        assert await asked(it, 4, stream=True) == [200] * 4


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode", "merged"])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
async def test_a_retry_goes_to_another_server(engine, side, failure):
    retry = RetrySettings(max_attempts=2, first_delay_seconds=0)
    async with pair(engine, breaker_failures=99, retry=retry, **num_of(side)) as it:
        side_of(it, side)[0].fails = lambda got: failure
        assert await asked(it, 8, headers=headers_of(side)) == [200] * 8
        assert side_of(it, side)[0].got


async def test_an_error_within_a_stream_counts_as_one_of_its_status():
    async with pair("sglang", num_decode=2, breaker_failures=2, breaker_seconds=NEVER) as it:

        async def told(request: Any, got: Any, extra: Any) -> Any:
            from aiohttp import web

            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n')
            return response

        it.d._send = told  # type: ignore[method-assign]
        await asked(it, 12, stream=True)
        assert (await breakers(it)) == {"prefill-0": "closed", "decode-0": "open", "decode-1": "closed"}


async def test_transfers_that_fail_from_one_prefill_server_leave_the_decode_servers_alone():
    async with pair("vllm", num_prefill=2, num_decode=2, breaker_failures=2, breaker_seconds=NEVER) as it:
        broken = it.prefill[0].engine_id
        for server in it.decode:
            original = server._whole

            def whole(*parts: Any, server: Any = server, original: Any = original) -> Any:
                answer = original(*parts)
                if server.got[-1].body["kv_transfer_params"]["remote_engine_id"] == broken:
                    answer["choices"][0]["finish_reason"] = "error"
                return answer

            server._whole = whole  # type: ignore[method-assign]
        await asked(it, 24)
        states = await breakers(it)
        assert states == {"prefill-0": "open", "prefill-1": "closed", "decode-0": "closed", "decode-1": "closed"}


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_a_decode_server_that_could_not_load_what_prefill_left_is_not_ill(max_attempts):
    """vLLM tells it with status 500 where it doesn't stream."""
    options: dict[str, Any] = {"num_prefill": 2, "num_decode": 2, "breaker_failures": 2, "breaker_seconds": NEVER}
    retry = RetrySettings(max_attempts=max_attempts, first_delay_seconds=0)
    async with pair("vllm", retry=retry, **options) as it:
        broken = it.p.engine_id
        for server in it.decode:
            original = server._vllm_decode

            async def decode(got: Any, original: Any = original) -> Any:
                if got.body["kv_transfer_params"]["remote_engine_id"] == broken:
                    return {}, (500, "Internal server error")
                return await original(got)

            server._vllm_decode = decode  # type: ignore[method-assign]
        await asked(it, 24)
        states = await breakers(it)
        assert states == {"prefill-0": "open", "prefill-1": "closed", "decode-0": "closed", "decode-1": "closed"}


async def test_a_hung_decode_server_that_knows_the_prompt_is_left_for_another_one():
    """The prefix would lead every request there, and with the same prefill server it never shows whose fault it is."""
    limits = {"handoff_timeout_seconds": 0.2}
    async with pair("vllm", num_decode=2, breaker_failures=1, breaker_seconds=NEVER, **limits) as it:
        it.d.fails = lambda got: "hang"
        statuses = [(await it.ask(TEXT_BODY, prompt="one and the same " * 99, stream=True)).status for _ in range(6)]
        assert statuses[-2:] == [200, 200]
        assert await breakers(it) == {"prefill-0": "closed", "decode-0": "open", "decode-1": "closed"}


async def test_the_only_prefill_server_that_fits_is_refused_with_a_time_to_come_back():
    others = {"prefill-1": {"model": "another"}}
    async with pair("vllm", num_prefill=2, breaker_failures=1, breaker_seconds=NEVER, changed=others) as it:
        await until_checked(it)
        it.p.fails = lambda got: "reset"
        await it.ask()
        answer = await it.ask()
        assert (answer.status, answer.error["code"]) == (503, "target_unavailable")
        assert "prefill-0 has failed several times in a row (broken)" in answer.error["message"]
        assert 0 < int(answer.headers["Retry-After"]) <= NEVER


async def test_figures_that_are_missing_are_told_why():
    async with pair("sglang", num_merged=1, changed={"merged": {"metrics_text": "sglang:token_usage 0.5"}}) as it:
        await until_breaker(it, "merged-0", "closed")
        it.d.is_healthy = False
        await until_state(it, "decode-0", "down")
        page = (await it.gateway.get("/v1/engines")).json()["upstreams"]["pair"]["servers"]
        why = {server["name"]: server["figures_missing"] for server in page}
        assert why == {
            "prefill-0": "exports none of these: GET /metrics has other series",
            "decode-0": "not asked: the server is down",
            "merged-0": None,
        }
        here = (await it.state())["servers"][0]
        assert here["figures_missing"] == "not asked for here: GET /v1/engines asks"


@pytest.mark.parametrize("engine", ["sglang", "vllm-mooncake"])
async def test_a_decode_server_that_gives_up_on_an_ill_prefill_server_is_not_ill(engine):
    """It tells of the failed transfer with a status of its own, while the prefill server still says nothing."""
    numbers = {"num_prefill": 2, "num_decode": 2} if engine == "sglang" else {"num_decode": 3}
    async with pair(engine, breaker_failures=2, breaker_seconds=NEVER, **numbers) as it:
        for server in it.decode:
            original = getattr(server, f"_{server.engine}_decode")

            async def decode(got: Any, original: Any = original) -> Any:
                key = _key(got)
                await until(lambda: any(_key(other) == key for s in it.prefill for other in s.got))
                if any(_key(other) == key for other in it.p.got):
                    return {}, (500, "KV transfer failed")
                return await original(got)

            setattr(server, f"_{server.engine}_decode", decode)
        it.p.fails = lambda got: "hang"
        await asked(it, 16)
        states = await breakers(it)
        assert states.pop("prefill-0") == "open"
        assert set(states.values()) == {"closed"}


def _key(got: Any) -> Any:
    params = got.body.get("kv_transfer_params") or {}
    return got.body.get("bootstrap_room") or params.get("transfer_id")
