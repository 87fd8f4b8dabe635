"""Which servers of a pair take a request, and what the gateway says of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from pairs_support import CHAT, SPLIT, WHOLE, pair, until_state
from web_support import running

from gateway.settings.schema import PairSettings, RetrySettings, Settings
from support.pd_servers import TEXT
from support.waiting import until

# ------------------------------------------------------------------------------------------------- who belongs together


@pytest.mark.parametrize(
    ("engine", "facts", "words"),
    [
        ("vllm", {"version": "0.32.0"}, "version: prefill has 0.33.0, decode has 0.32.0"),
        ("vllm", {"model": "other"}, "models: prefill has m, decode has other"),
        ("sglang", {"page_size": 64}, "page size: prefill has 16, decode has 64"),
        ("sglang", {"kv_dtype": "fp8_e4m3"}, "KV dtype: prefill has auto, decode has fp8_e4m3"),
        ("vllm", {"kv_dtype": "fp8_e5m2"}, "KV dtype: prefill has auto, decode has fp8_e5m2"),
        ("sglang", {"side": "prefill"}, "disaggregation mode prefill, which must be decode"),
        ("vllm", {"engine": "sglang"}, "the decode server is SGLang"),
    ],
)
async def test_servers_that_do_not_fit_are_refused_with_both_values(engine, facts, words):
    async with pair(engine, changed={"decode": facts}) as it:
        answer = await it.ask(model=it.d.model)
        assert (answer.status, answer.error["code"]) == (503, "mode_unavailable")
        assert words in answer.error["message"]
        assert not it.p.got
        problem = (await it.state())["pairs"][0]["problem"]
        assert words in problem


async def test_pd_13_the_protocol_that_is_set_is_checked_against_the_servers():
    async with pair("vllm") as it:
        settings = Settings(
            pairs=(PairSettings(name="pair", engine="sglang", prefill=(it.p.url,), decode=(it.d.url,)),),
            retry=RetrySettings(max_attempts=1),
        )
        async with running(settings) as gateway:
            answer = await gateway.post("/v1/chat/completions", CHAT, headers=SPLIT)
            assert 'is vLLM, and engine = "sglang" is a protocol of SGLang' in answer.error["message"]
            health = (await gateway.get("/health")).json()
            assert health["modes"] == {"merged": "not served", "split": "pair (sglang): 1 prefill + 1 decode"}


async def test_a_prefill_server_that_does_not_fit_is_passed_over_for_one_that_does():
    async with pair("vllm", num_prefill=2, changed={"prefill-0": {"version": "0.1.0"}}) as it:
        for i in range(4):
            answer = await it.ask(messages=[{"role": "user", "content": str(i)}])
            assert answer.headers["X-Cache-Instance"] == "prefill-1 + decode-0"


async def test_a_decode_server_that_fits_no_prefill_server_is_passed_over_for_one_that_does():
    async with pair("vllm", num_decode=2, changed={"decode-0": {"version": "0.1.0"}}) as it:
        for i in range(4):
            answer = await it.ask(messages=[{"role": "user", "content": str(i)}])
            assert (answer.status, answer.headers.get("X-Cache-Instance")) == (200, "prefill-0 + decode-1")
        chosen = await it.ask(cacheStrategy={"mode": "split", "decodeEndpoint": it.d.url})
        assert (chosen.status, "decode has 0.1.0" in chosen.error["message"]) == (503, True)
    async with pair("vllm", num_decode=2, changed={"decode": {"version": "0.1.0"}}) as it:
        answer = await it.ask()
        assert (answer.status, "decode has 0.1.0" in answer.error["message"]) == (503, True)


async def test_one_process_behind_two_addresses_is_no_pair():
    text = "\n".join(f"vllm:{name}_created 1764000000.4{i}" for i, name in enumerate("abcdef"))
    same = {"metrics_text": f"process_start_time_seconds 1764000000.42\n{text}"}
    async with pair("vllm", changed={"prefill": same, "decode": same}) as it:
        answer = await it.ask()
        assert (answer.status, "both are the same server" in answer.error["message"]) == (503, True)


async def test_servers_that_were_started_together_are_two():
    text = "process_start_time_seconds 1764000000.42\n" + "\n".join(
        f"vllm:x{i}_created 1764000000.4{{}}{i}" for i in range(6)
    )
    changed = {
        "prefill": {"metrics_text": text.format(1, 1, 1, 1, 1, 1)},
        "decode": {"metrics_text": text.format(2, 2, 2, 2, 2, 2)},
    }
    async with pair("vllm", changed=changed) as it:
        assert (await it.ask()).status == 200


async def test_fitting_servers_are_asked_once_about_it_however_many_requests_come():
    async with pair("vllm") as it:
        assert {answer.status for answer in await asyncio.gather(*(it.ask() for _ in range(50)))} == {200}
        assert (it.p.num_version_asked, it.d.num_version_asked) == (1, 1)
        it.d.version = "another"
        assert (await it.ask()).status == 200


# ------------------------------------------------------------------------------------------------------------ addresses


async def test_a_request_may_choose_among_the_servers_of_the_settings():
    async with pair("vllm", num_prefill=2, num_decode=2) as it:
        chosen = {"prefillEndpoint": it.prefill[1].url + "/", "decodeEndpoint": it.decode[1].url}
        for _ in range(3):
            answer = await it.ask(cacheStrategy={"mode": "split", **chosen})
            assert answer.headers["X-Cache-Instance"] == "prefill-1 + decode-1"
        assert "cacheStrategy" not in it.prefill[1].got[0].body


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
async def test_a_server_may_be_chosen_by_any_spelling_of_its_base_url(ending):
    async with pair("vllm", num_prefill=2) as it:
        url = it.prefill[1].url.replace("http", "HTTP") + ending
        answer = await it.ask(cacheStrategy={"mode": "split", "prefillEndpoint": url})
        assert (answer.status, answer.headers.get("X-Cache-Instance")) == (200, "prefill-1 + decode-0")


@pytest.mark.parametrize("name", ["prefillEndpoint", "decodeEndpoint"])
async def test_a_request_may_not_choose_any_other_address(name):
    async with pair("vllm") as it, pair("vllm") as other:
        answer = await it.ask(cacheStrategy={"mode": "split", name: other.p.url})
        assert (answer.status, name in answer.error["param"]) == (400, True)
        assert not other.p.got
        swapped = it.d.url if name == "prefillEndpoint" else it.p.url
        assert (await it.ask(cacheStrategy={"mode": "split", name: swapped})).status == 400


# -------------------------------------------------------------------------------------------------------- choice, facts


async def test_turns_of_a_conversation_meet_their_servers_again():
    async with pair("vllm", num_prefill=3, num_decode=3) as it:
        for i in range(3):
            await it.ask(messages=[{"role": "user", "content": f"{i} " * 2000}])
        seen: list[set[str]] = []
        for i in range(3):
            turns = [{"role": "user", "content": f"{i} " * 2000}, {"role": "assistant", "content": "a"}]
            seen.append(
                {(await it.ask(messages=[*turns, {"role": "user", "content": "go on"}])).headers["X-Cache-Instance"]}
            )
        assert len(set.union(*seen)) == 3
        reason = (await it.ask(messages=[{"role": "user", "content": "0 " * 2000}])).headers["X-Cache-Instance-Reason"]
        assert "known" in reason


async def test_merged_replicas_share_the_load_and_one_that_is_gone_is_passed_over():
    async with pair("vllm", num_prefill=0, num_decode=0, num_merged=2) as it:
        go = asyncio.Event()
        for server in it.merged:
            server.pause = lambda where: go if where == "start" else None
        merged = {"X-Cache-Mode": "merged"}
        asking = [asyncio.create_task(it.ask(headers=merged)) for _ in range(6)]
        await until(lambda: [len(server.got) for server in it.merged] == [3, 3], "half each")
        go.set()
        assert {(await task).status for task in asking} == {200}
        assert (await it.ask()).error["code"] == "mode_unavailable"


async def test_the_two_legs_are_timed_apart():
    async with pair("vllm") as it:
        answer = await it.ask(stream=True)
        timing = answer.headers["Server-Timing"]
        record = await it.gateway.record(answer)
        counts = [
            await it.gateway.metric("kvgate_leg_seconds_count", backend="pair", leg=leg)
            for leg in ("prefill", "decode_first")
        ]
    assert "prefill;dur=" in timing
    assert "decode_first;dur=" in timing
    assert record["timings"]["prefill_seconds"] > 0
    assert record["timings"]["decode_first_seconds"] > 0
    assert record["instance"] == "prefill-0 + decode-0"
    assert counts == [1, 1]


async def test_the_servers_own_figures_are_shown_and_exported():
    series = ("vllm:kv_cache_usage_perc 0.25", "vllm:prefix_cache_queries_total 40", "vllm:prefix_cache_hits_total 30")
    text = "\n".join(series)
    async with pair("vllm", changed={"prefill": {"metrics_text": text}}) as it:
        await until_state(it, "prefill-0", "up")
        page = (await it.gateway.get("/v1/engines")).json()["upstreams"]["pair"]
        exported = (await it.gateway.get("/metrics")).body.decode()
        figures = {server["name"]: server["figures"] for server in page["servers"]}
    assert figures["prefill-0"]["kv_usage"] == 0.25
    assert figures["prefill-0"]["prefix_hit_tokens"] == 30
    assert 'kvgate_server_kv_usage_ratio{backend="pair",server="prefill-0"} 0.25' in exported
    assert 'kvgate_server_kv_usage_ratio{backend="pair",server="decode-0"}' not in exported
    assert 'kvgate_server_up{backend="pair",server="decode-0"} 1.0' in exported


async def test_models_are_those_of_the_servers_in_both_modes():
    async with pair("vllm", num_merged=1) as it:
        cards = {card["id"]: card for card in (await it.gateway.get("/v1/models")).json()["data"]}
        assert set(cards) == {"m", "m:merged", "m:split"}
        assert (await it.gateway.post("/v1/chat/completions", {**CHAT, "model": "m:split"})).headers[
            "X-Cache-Mode"
        ] == "split"


# ---------------------------------------------------------------------------------------- the same as on the plain path


async def test_pd_14_other_dialects_are_translated_and_served_split():
    body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    async with pair("vllm") as it:
        whole = await it.gateway.post("/v1/messages", body, headers=SPLIT)
        stream = await it.gateway.post("/v1/messages", {**body, "stream": True}, headers=SPLIT)
        responses = await it.gateway.post("/v1/responses", {"model": "m", "input": "hi"}, headers=SPLIT)
    assert whole.json()["content"][0]["text"] == WHOLE
    assert whole.json()["usage"]["cache_read_input_tokens"] == 3
    assert b"message_stop" in stream.body
    assert responses.json()["output"][0]["content"][0]["text"] == WHOLE
    assert {whole.headers["X-Cache-Mode"], responses.headers["X-Cache-Mode"]} == {"split"}


@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_pd_14_a_stream_that_is_cut_is_an_error_in_either_mode(mode):
    async with pair("vllm", num_merged=1) as it:
        server = it.d if mode == "split" else it.merged[0]
        reached = asyncio.Event()

        def pause(where: str) -> asyncio.Event | None:
            if where == "piece 2":
                reached.set()
                raise ConnectionResetError
            return None

        server.pause = pause
        answer = await it.ask(stream=True, headers={"X-Cache-Mode": mode})
        assert reached.is_set()
        assert (answer.text(), answer.done) == ("".join(TEXT[:3]), False)
        assert "error" in answer.chunks()[-1]


@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_pd_14_usage_that_was_not_asked_for_is_counted_and_not_sent(mode):
    async with pair("vllm", num_merged=1) as it:
        answer = await it.ask(stream=True, headers={"X-Cache-Mode": mode})
        assert all(not chunk.get("usage") for chunk in answer.chunks())
        assert await it.gateway.metric("kvgate_generation_tokens_total", cache_mode=mode, backend="pair") == 4


@pytest.mark.parametrize("mode", ["merged", "split"])
async def test_pd_14_keys_go_to_every_server_and_clients_own_to_none(mode):
    async with pair("vllm", num_merged=1, api_key="sk-servers") as it:
        await it.ask(headers={"X-Cache-Mode": mode, "Authorization": "Bearer sk-client"})
        asked = [*it.p.got, *it.d.got] if mode == "split" else it.merged[0].got
        assert [got.header("Authorization") for got in asked] == ["Bearer sk-servers"] * len(asked)


async def test_a_prompt_kept_out_of_prefix_caches_has_one_salt_on_both_sides():
    async with pair("vllm") as it:
        await it.ask(cacheStrategy={"mode": "split", "enablePrefixCache": False})
        await it.ask()
        salts = [(p.body.get("cache_salt"), d.body.get("cache_salt")) for p, d in zip(it.p.got, it.d.got, strict=True)]
    assert salts[0][0] == salts[0][1] is not None
    assert salts[1] == (None, None)


async def test_a_long_prompt_reaches_both_servers_whole():
    content = json.dumps({"x": "y" * 3_000_000})
    async with pair("vllm") as it:
        answer = await it.ask(messages=[{"role": "user", "content": content}])
        assert answer.status == 200
        assert [got.body["messages"][0]["content"] for got in (it.p.got[0], it.d.got[0])] == [content, content]
