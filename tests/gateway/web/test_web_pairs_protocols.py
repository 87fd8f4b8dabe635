"""What each server of a pair is sent, to the letter, and what of its answer reaches the client."""

from __future__ import annotations

from typing import Any

import pytest
from pairs_support import CHAT, KINDS, TEXT_BODY, WHOLE, pair, said

from support.pd_servers import TEXT
from support.waiting import until

# ------------------------------------------------------------------------------------------------------------ protocols


@pytest.mark.parametrize("body", [CHAT, TEXT_BODY], ids=["chat", "text"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("engine", KINDS)
async def test_every_protocol_gives_the_whole_answer(engine, stream, body):
    async with pair(engine) as it:
        answer = await it.ask(body, stream=stream)
        assert answer.status == 200, answer.body
        told = answer.text() if stream else said(answer)
        assert (told, answer.headers["X-Cache-Mode"]) == (WHOLE, "split")
        await until(lambda: it.num_blocks == (0, 0), "blocks are free")
        expected = {"prefill": 0 if engine == "llm-d" else 1, "decode": 1}
        assert {"prefill": len(it.p.got), "decode": len(it.d.got)} == expected


async def test_pd_09_the_prefill_leg_asks_for_one_token_and_the_decode_leg_is_the_clients():
    asked = {"max_tokens": 500, "min_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    more = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "logprobs": True}
    async with pair("vllm") as it:
        await it.ask(**asked, **more, top_logprobs=3, max_completion_tokens=400)
        prefill, decode = it.p.got[0].body, it.d.got[0].body
    params = prefill.pop("kv_transfer_params")
    kept = {"tools": more["tools"], "tool_choice": "required"}
    assert prefill == {**CHAT, **kept, "max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    assert params == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    decode.pop("kv_transfer_params")
    assert decode == {**CHAT, **asked, **more, "top_logprobs": 3, "max_completion_tokens": 400}


async def test_pd_09_a_store_takes_several_answers_of_which_prefill_makes_none():
    asked = {"max_tokens": 500, "min_tokens": 100, "n": 2, "best_of": 3}
    async with pair("store") as it:
        await it.ask(TEXT_BODY, **asked)
        assert it.p.got[0].body == {**TEXT_BODY, "max_tokens": 1, "stream": False}
        assert it.d.got[0].body == {**TEXT_BODY, **asked}


@pytest.mark.parametrize("engine", ["vllm", "vllm-mooncake", "sglang", "llm-d", "tensorrt-llm"])
@pytest.mark.parametrize("field", [{"n": 2}, {"prompt_logprobs": 1}])
async def test_pd_09_what_two_servers_cannot_do_is_refused_by_name(engine, field):
    async with pair(engine) as it:
        answer = await it.ask(**field)
        assert (answer.status, answer.error["param"]) == (400, next(iter(field)))
        assert "merged" in answer.error["message"]
        assert not it.p.got
        assert not it.d.got


async def test_both_legs_carry_one_request_id_and_each_request_its_own():
    async with pair("vllm") as it:
        await it.ask()
        await it.ask()
        ids = [(p.header("X-Request-Id"), d.header("X-Request-Id")) for p, d in zip(it.p.got, it.d.got, strict=True)]
    assert all(p == d for p, d in ids)
    assert len(set(ids)) == 2


async def test_what_prefill_says_of_its_kv_reaches_decode_verbatim_and_the_client_not_at_all():
    async with pair("vllm") as it:
        answers = [await it.ask(), await it.ask(stream=True)]
        params = it.d.got[0].body["kv_transfer_params"]
    assert params["a_later_field"] == {"opaque": [1, None, "x"]}
    assert params["remote_engine_id"] == it.p.engine_id
    assert all(b"remote_host" not in answer.body for answer in answers)


async def test_sglang_gets_one_room_for_both_and_another_for_every_request():
    async with pair("sglang") as it:
        await it.ask()
        await it.ask()
        told = [[got.body for got in server.got] for server in (it.p, it.d)]
    for prefill, decode in zip(*told, strict=True):
        assert prefill == decode
        assert prefill["bootstrap_host"] == "127.0.0.1"
        assert prefill["bootstrap_port"] == 8998 + it.p.port % 7  # as the server says
        assert 0 <= prefill["bootstrap_room"] < 2**63
        assert len(prefill["rid"]) == 32
        assert "max_tokens" not in prefill
    assert told[0][0]["bootstrap_room"] != told[0][1]["bootstrap_room"]


async def test_llm_d_is_told_the_prefill_server_and_never_one_that_a_client_names():
    async with pair("llm-d") as it:
        await it.ask(headers={"x-prefiller-host-port": "10.0.0.1:22"})
        assert it.d.got[0].header("x-prefiller-host-port") == f"127.0.0.1:{it.p.port}"
    async with pair("vllm", num_merged=1) as it:
        await it.ask(headers={"x-prefiller-host-port": "10.0.0.1:22", "X-Cache-Mode": "merged"})
        assert it.merged[0].got[0].header("x-prefiller-host-port") is None


@pytest.mark.parametrize("field", ["kv_transfer_params", "disaggregated_params", "bootstrap_host"])
@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_a_client_cannot_say_from_where_kv_is_fetched(field, mode):
    async with pair("vllm", num_merged=1) as it:
        answer = await it.ask(headers={"X-Cache-Mode": mode}, **{field: {"remote_host": "10.0.0.1"}})
        assert (answer.status, answer.error["param"]) == (400, field)


async def test_one_token_is_made_by_prefill_alone():
    async with pair("vllm") as it:
        answer = await it.ask(max_tokens=1)
        assert (said(answer), answer.headers["X-Cache-Instance"]) == (TEXT[0], "prefill-0")
        assert "kv_transfer_params" not in it.p.got[0].body
        assert not it.d.got


@pytest.mark.parametrize("stream", [False, True])
async def test_tensorrt_an_answer_that_ends_in_the_context_is_the_whole_one(stream):
    async with pair("tensorrt-llm") as it:
        original = it.p._whole
        it.p._whole = lambda *parts: finished(original(*parts))  # type: ignore[method-assign]
        answer = await it.ask(stream=stream)
        assert (answer.text() if stream else said(answer)) == TEXT[0]
        assert not it.d.got
        assert not stream or (answer.finish_reasons() == ["stop"] and answer.done)


def finished(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["finish_reason"] = "stop"
    return answer


# ---------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "vllm-mooncake", "tensorrt-llm", "store"])
async def test_pd_11_cached_tokens_are_those_of_prefill(engine, stream):
    async with pair(engine, changed={"prefill": {"cached_tokens": 0}}) as it:
        answer = await it.ask(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        usage = answer.chunks()[-1]["usage"] if stream else answer.json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 4)
        name = "kvgate_cached_tokens_total"
        assert await it.gateway.metric(name, cache_mode="split", backend="pair") == 0


async def test_pd_11_where_prefill_does_not_say_nobody_does():
    async with pair("vllm", changed={"prefill": {"cached_tokens": None}}) as it:
        assert (await it.ask()).json()["usage"]["prompt_tokens_details"] is None


async def test_merged_servers_count_for_themselves():
    async with pair("vllm", num_merged=1, changed={"merged": {"cached_tokens": 7}}) as it:
        answer = await it.ask(headers={"X-Cache-Mode": "merged"})
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
        assert answer.headers["X-Cache-Mode"] == "merged"
        assert not it.p.got
