"""Split requests as hostile clients, broken servers and odd fields make them: what each leg gets, who is told what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from pairs_support import CHAT, SPLIT, TEXT_BODY, WHOLE, Pair, pair, said, until_checked

from support.pd_servers import Got, PdServer
from support.waiting import until, until_told

# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("engine", ["vllm", "vllm-mooncake", "sglang", "store", "tensorrt-llm", "llm-d"])
async def test_pd_14_a_text_completion_of_token_ids_is_served_split(engine):
    async with pair(engine) as it:
        answer = await it.ask({"model": "m", "prompt": [5, 6, 7]}, max_tokens=9)
        assert (answer.status, said(answer)) == (200, WHOLE), answer.body
        if engine not in ("llm-d",):
            assert it.p.got[0].body["prompt"] == [5, 6, 7]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]], ids=["texts", "token ids"])
@pytest.mark.parametrize("engine", ["vllm", "vllm-mooncake", "tensorrt-llm", "llm-d"])
async def test_a_list_of_prompts_is_refused_where_one_transfer_serves_one(engine, prompt):
    async with pair(engine) as it:
        answer = await it.ask({"model": "m", "prompt": prompt})
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert "a list of prompts" in answer.error["message"]
        assert "X-Cache-Mode: merged" in answer.error["message"]
        assert not it.p.got
        assert not it.d.got


async def test_a_list_of_one_prompt_is_one_prompt():
    async with pair("vllm") as it:
        assert (await it.ask({"model": "m", "prompt": ["hi"]})).status == 200
        assert it.d.got[0].body["prompt"] == ["hi"]


# ------------------------------------------------------------------------------------------------------------ the legs


async def test_pd_09_what_a_prefill_of_one_token_can_not_do_is_taken_out_of_it_alone():
    asked = {"min_tokens": 9, "best_of": 1, "echo": True, "response_format": {"type": "json_object"}, "stop": ["x"]}
    async with pair("vllm") as it:
        await it.ask(TEXT_BODY, max_tokens=50, **asked)
        prefill, decode = it.p.got[0].body, it.d.got[0].body
    prefill.pop("kv_transfer_params")
    decode.pop("kv_transfer_params")
    assert prefill == {**TEXT_BODY, "max_tokens": 1, "stream": False, "stop": ["x"], **only(asked, "response_format")}
    assert decode == {**TEXT_BODY, "max_tokens": 50, **asked}


def only(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: fields[name]}


async def test_pd_09_a_newer_limit_that_is_null_stays_null():
    async with pair("vllm") as it:
        await it.ask(max_completion_tokens=None, max_tokens=7)
        assert (it.p.got[0].body["max_tokens"], it.p.got[0].body["max_completion_tokens"]) == (1, None)
        assert it.d.got[0].body["max_tokens"] == 7


@pytest.mark.parametrize("engine", ["vllm", "vllm-mooncake", "sglang"])
async def test_a_beam_search_is_several_answers_too(engine):
    async with pair(engine) as it:
        answer = await it.ask(use_beam_search=True)
        assert (answer.status, answer.error["param"]) == (400, "use_beam_search")
        assert not it.p.got


@pytest.mark.parametrize(
    ("engine", "fields", "param"),
    [
        ("sglang", {"rid": "a"}, "rid"),  # a prefix of everybody's, to SGLang
        ("sglang", {"disagg_prefill_dp_rank": 1}, "disagg_prefill_dp_rank"),
        ("sglang", {"bootstrap_room": 5}, "bootstrap_room"),
        ("vllm", {"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ("vllm", {"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_lc_01_what_steers_transfers_and_aborts_is_not_a_clients(engine, fields, param, mode):
    async with pair(engine, num_merged=1) as it:
        answer = await it.ask(headers={"X-Cache-Mode": mode}, **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert not [*it.p.got, *it.d.got, *it.merged[0].got]


async def test_lc_01_one_id_of_two_clients_is_two_ids_at_the_servers():
    async with pair("sglang") as it:
        answers = await asyncio.gather(*(it.ask(headers={"X-Request-Id": "same"}, stream=True) for _ in range(4)))
        ids = [[got.header("X-Request-Id") for got in server.got] for server in (it.p, it.d)]
        rids = [[got.body["rid"] for got in server.got] for server in (it.p, it.d)]
    assert [answer.text() for answer in answers] == [WHOLE] * 4
    assert sorted(map(str, ids[0])) == sorted(map(str, ids[1]))
    assert sorted(rids[0]) == sorted(rids[1])
    assert (len(set(ids[0])), len(set(rids[0])), {len(rid) for rid in rids[0]}) == (4, 4, {32})


async def test_clients_headers_that_steer_transfers_reach_neither_server():
    steering = {
        "X-data-parallel-rank": "7",
        "x-prefiller-host-port": "10.0.0.1:1",
        "x-encoder-hosts-ports": "10.0.0.1:1",
    }
    for engine in ("vllm", "vllm-mooncake"):
        async with pair(engine) as it:
            assert (await it.ask(headers=steering)).status == 200
            for got in (*it.p.got, *it.d.got):
                assert got.header("x-prefiller-host-port") is got.header("x-encoder-hosts-ports") is None
                assert got.header("X-data-parallel-rank") in (None, "0")
            assert it.d.got[0].header("X-data-parallel-rank") is None


async def test_mooncake_both_legs_name_one_transfer_and_where_prefill_is():
    async with pair("vllm-mooncake") as it:
        await it.ask(max_tokens=9, stream=True)
        prefill, decode = it.p.got[0].body, it.d.got[0].body
    told = prefill["kv_transfer_params"]
    assert told == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": told["transfer_id"]}
    assert told["transfer_id"].startswith("xfer-")
    assert decode["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://127.0.0.1:{it.p.port}",
        "remote_engine_id": it.p.engine_id,
        "transfer_id": told["transfer_id"],
    }
    assert (prefill["max_tokens"], prefill["stream"], decode["max_tokens"], decode["stream"]) == (1, False, 9, True)


async def test_mooncake_a_bootstrap_service_that_comes_later_is_asked_again():
    async with pair("vllm-mooncake", changed={"prefill": {"ranks_told": False}}) as it:
        early = await it.ask()
        it.p.ranks_told = True
        assert (early.status, "tells no engine" in early.error["message"]) == (502, True)
        assert not it.d.got
        assert (await it.ask()).status == 200


@pytest.mark.parametrize(("path", "fields"), [("/v1/messages", {"max_tokens": 50}), ("/v1/responses", {})])
async def test_pd_09_other_dialects_have_a_prefill_of_one_token_too(path, fields):
    prompt = {"messages": CHAT["messages"]} if path == "/v1/messages" else {"input": "hi"}
    async with pair("vllm") as it:
        answer = await it.gateway.post(path, {"model": "m", **prompt, **fields, "stream": True}, headers=SPLIT)
        prefill, decode = it.p.got[0].body, it.d.got[0].body
    assert answer.status == 200
    assert (prefill["max_tokens"], prefill["stream"], "stream_options" in prefill) == (1, False, False)
    assert decode["stream"] is True
    assert prefill["messages"] == decode["messages"]
    assert it.p.got[0].path == it.d.got[0].path == "/v1/chat/completions"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_other_dialects_are_told_of_either_sides_failure(engine):
    body = {"model": "m", "max_tokens": 50, "messages": CHAT["messages"]}
    for side in ("p", "d"):
        async with pair(engine) as it:
            refuse(it, side, 500, once_both_are_asked=engine == "sglang")
            answer = await it.gateway.post("/v1/messages", body, headers=SPLIT)
            assert (answer.status, answer.json()["type"]) == (502, "error")
            assert "answered 500" in answer.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------- what prefill answers


def answering(server: PdServer, change: Callable[[dict[str, Any]], Any]) -> None:
    """The server's whole answers, changed."""
    original = server._whole
    server._whole = lambda *parts: change(original(*parts))  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, "no kv_transfer_params"),
        ({}, "no kv_transfer_params"),
        ("text", "no kv_transfer_params"),
        ([1], "no kv_transfer_params"),
        ({"do_remote_prefill": False, "remote_engine_id": "x"}, "no KV to fetch"),
    ],
)
async def test_kv_that_can_not_be_fetched_is_said_before_decode_would_compute_it_in_silence(params, words):
    async with pair("vllm") as it:
        answering(it.p, lambda whole: {**whole, "kv_transfer_params": params})
        answer = await it.ask()
        assert (answer.status, words in answer.error["message"]) == (502, True)
        assert not it.d.got
        assert await it.gateway.metric("kvgate_leg_failures_total", backend="pair", side="prefill") == 1


async def raw_answer(server: PdServer, body: bytes, **headers: str) -> None:
    """The server answers every request with these bytes."""

    async def send(request: web.Request, got: Got, extra: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
        await response.prepare(request)
        await response.write(body)
        if "Content-Length" in headers:
            assert request.transport is not None
            request.transport.close()  # before the length is reached
        return response

    server._send = send  # type: ignore[method-assign]


DEEP = b'{"kv_transfer_params": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}"


@pytest.mark.parametrize(
    "body", [b'{"kv_transfer_params": {"remote_block_ids": [[1, 2', b"", b"<html>", b"[1]", DEEP], ids=range(5)
)
async def test_a_prefill_answer_that_is_cut_or_no_json_is_the_prefills_failure(body):
    async with pair("vllm") as it:
        await raw_answer(it.p, body)
        answer = await it.ask()
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
        assert not it.d.got
        assert await it.gateway.metric("kvgate_leg_failures_total", backend="pair", side="prefill") == 1


async def test_a_prefill_answer_that_is_cut_below_its_length_is_the_prefills_failure():
    async with pair("vllm") as it:
        await raw_answer(it.p, b'{"kv_transfer_params": {', **{"Content-Length": "500"})
        answer = await it.ask()
        assert answer.status == 502
        assert not it.d.got


async def test_large_transfer_parameters_are_passed_on_whole():
    blocks = [list(range(200_000))]
    async with pair("vllm") as it:
        answering(it.p, lambda whole: with_blocks(whole, blocks))
        assert (await it.ask()).status == 200
        assert it.d.got[0].body["kv_transfer_params"]["remote_block_ids"] == blocks


def with_blocks(whole: dict[str, Any], blocks: list[list[int]]) -> dict[str, Any]:
    return {**whole, "kv_transfer_params": {**whole["kv_transfer_params"], "remote_block_ids": blocks}}


@pytest.mark.parametrize("side", ["p", "d"])
async def test_an_endless_answer_of_either_side_is_not_kept(monkeypatch, side):
    monkeypatch.setattr("gateway.upstreams.pd.legs._MAX_ANSWER", 100_000)
    async with pair("vllm") as it:
        await raw_answer(getattr(it, side), b'{"x": "' + b"y" * 200_000 + b'"}')
        answer = await it.ask()
        assert (answer.status, "too long" in answer.error["message"]) == (502, True)
        assert len(it.d.got) == (side == "d")


@pytest.mark.parametrize("stream", [False, True])
async def test_tensorrt_what_the_context_server_tells_the_other_is_not_for_the_client(stream):
    async with pair("tensorrt-llm") as it:
        answering(it.p, lambda whole: {**whole, "choices": [{**whole["choices"][0], "finish_reason": "stop"}]})
        context = await it.ask(stream=stream)
        assert not it.d.got
    async with pair("tensorrt-llm") as it:
        answering(it.d, lambda whole: {**whole, "choices": [{**whole["choices"][0], "disaggregated_params": {"a": 1}}]})
        generated = await it.ask()
    for answer in (context, generated):
        assert answer.status == 200
        assert b"disaggregated_params" not in answer.body
        assert b"encoded_opaque_state" not in answer.body
        assert b"prompt_token_ids" not in answer.body


# ----------------------------------------------------------------------------------------------------- who has refused


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [400, 404, 422, 429])
@pytest.mark.parametrize(("engine", "side"), [("vllm", "p"), ("vllm", "d"), ("sglang", "d"), ("vllm-mooncake", "d")])
async def test_a_refusal_is_the_servers_own_and_the_answer_says_whose(engine, side, status, stream):
    async with pair(engine) as it:
        refuse(it, side, status, once_both_are_asked=engine != "vllm")
        answer = await it.ask(stream=stream)
        name = "prefill" if side == "p" else "decode"
        assert (answer.status, answer.error["message"]) == (status, f"no: {status}")
        assert f"{name}-0 refused the request with {status}" in answer.headers["X-Kvgate-Notice"]
        assert answer.headers["X-Cache-Instance"] == ("prefill-0" if side == "p" else "prefill-0 + decode-0")
        await until(lambda: it.num_blocks == (0, 0), "blocks are free")
        assert await it.gateway.metric("kvgate_leg_failures_total", backend="pair", side=name) is None


def refuse(it: Pair, side: str, status: int, *, once_both_are_asked: bool) -> PdServer:
    """One side answers so, and the other one waits for it for ever, as engines do. Returns that other one."""
    refusing, waiting = (it.p, it.d) if side == "p" else (it.d, it.p)

    async def no(_got: Got) -> Any:
        return {}, (status, f"no: {status}")

    setattr(refusing, f"_{refusing.engine}_{refusing.side}", no)
    if once_both_are_asked:
        reached = asyncio.Event()

        def pause(where: str) -> asyncio.Event:
            reached.set()
            return asyncio.Event()

        waiting.pause = pause
        refusing.pause = lambda where: reached if where == "start" else None
    return waiting


@pytest.mark.parametrize("side", ["p", "d"])
async def test_pd_01_a_refusal_of_either_side_ends_the_other_one_at_once(side):
    """SGLang would hold a request whose partner was refused for as long as its bootstrap may take."""
    async with pair("sglang") as it:
        waiting = refuse(it, side, 400, once_both_are_asked=True)
        answer = await it.ask(stream=True)
        assert (answer.status, answer.error["message"]) == (400, "no: 400")
        await until(lambda: waiting.num_gone == 1, "the other was left")
        await until(lambda: it.p.aborted == it.d.aborted != [], "both were told")
        assert it.num_blocks == (0, 0)


# -------------------------------------------------------------------------------------------------- more of one server


async def test_one_process_under_two_names_of_a_side_is_used_once_and_said(caplog):
    born = "\n".join(f"vllm:{name}_created 1764000000.4{i}" for i, name in enumerate("abcdef"))
    changed = {"decode-0": {"metrics_text": born}, "decode-1": {"metrics_text": born}}
    async with pair("vllm", num_decode=2, changed=changed) as it:
        state = await until_told(it.state, lambda state: any(s["problem"] for s in state["servers"]))
        problems = {s["name"]: s["problem"] for s in state["servers"] if s["problem"]}
        used = {
            (await it.ask(messages=[{"role": "user", "content": str(i)}])).headers["X-Cache-Instance"] for i in range(6)
        }
    (double,) = problems
    other = "decode-0" if double == "decode-1" else "decode-1"
    assert f"it is the same server as {other}" in problems[double]
    assert used == {f"prefill-0 + {other}"}
    assert "is the same server as" in caplog.text


async def test_pd_13_servers_that_do_not_fit_are_said_before_anyone_asks_anything(caplog):
    async with pair("vllm", changed={"decode": {"kv_dtype": "fp8"}}) as it:
        (found,) = await until_checked(it)
        assert found["problem"] == "KV dtype: prefill has auto, decode has fp8; they must be equal"
        await until(lambda: "prefill-0 and decode-0 are no pair: KV dtype" in caplog.text, "the log says so")
        assert not it.p.got
