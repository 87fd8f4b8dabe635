"""The pure parts of pairs: what an answer becomes, who fits whom, what servers export, who waits for a place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from gateway.core.errors import InvalidRequest, ModeUnavailable, Overloaded, UpstreamError
from gateway.core.sse_scan import SseScanner
from gateway.core.types import CacheMode, CacheStrategy, StrategySource
from gateway.upstreams.pd.admission import Admission
from gateway.upstreams.pd.answer import PrefillUsage, as_stream, prefill_usage, tidied, tidied_frame
from gateway.upstreams.pd.bodies import asks_one_token, prefill_fields, split_fields, value
from gateway.upstreams.pd.choice import choice_request, salted
from gateway.upstreams.pd.facts import ServerFacts, mismatch, model_facts, mooncake_ranks, sglang_facts
from gateway.upstreams.pd.figures import PdFigures, read_cache_dtype, read_figures
from gateway.upstreams.pd.plans import PLANS, Attempt, LlmD, Sglang, VllmMooncake, VllmPull
from gateway.upstreams.pd.probe import _addresses


def fields(**said: object) -> dict[str, object]:
    return split_fields(json.dumps(said).encode())


def attempt(**changed: object) -> Attempt:
    known = {"request_id": "r-1", "rid": "0" * 32, "room": 7, "prefill_host": "p.example", "prefill_port": 8000}
    return Attempt(**{**known, **changed})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- bodies


@given(st.dictionaries(st.sampled_from(["messages", "tools", "response_format", "tool_choice", "x"]), st.text()))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_pd_09_what_may_change_the_prompt_reaches_the_prefill_untouched(said):
    leg = msgspec.json.decode(msgspec.json.encode(prefill_fields(fields(**said, n=1, min_tokens=9, stream=True))))
    assert leg == {**said, "max_tokens": 1, "stream": False}


@pytest.mark.parametrize(
    ("said", "one"),
    [
        ({"max_tokens": 1}, True),
        ({"max_completion_tokens": 1, "max_tokens": 9}, True),
        ({"max_completion_tokens": 9, "max_tokens": 1}, False),
        ({"max_tokens": True}, False),
        ({"max_tokens": None}, False),
        ({}, False),
    ],
)
def test_one_token_is_seen_as_servers_see_it(said, one):
    assert asks_one_token(fields(**said)) is one


def test_a_value_that_is_nested_too_deeply_is_refused_by_name():
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(InvalidRequest, match="prompt"):
        value({"prompt": msgspec.Raw(body[11:-1])}, "prompt")


def test_a_batch_for_sglang_has_a_room_for_each_prompt():
    leg = Sglang().decode(fields(prompt=["a", "b"]), attempt(room=2**63 - 1))
    assert leg.fields["bootstrap_room"] == [2**63 - 1, 0]
    assert leg.fields["bootstrap_host"] == ["p.example"] * 2
    assert [len(rid) for rid in leg.fields["rid"]] == [36, 36]
    assert "bootstrap_room" in Sglang().decode(fields(prompt=[1, 2]), attempt()).fields  # token ids are one prompt


def test_an_ipv6_address_has_brackets_wherever_servers_put_a_port_behind_it():
    at = attempt(prefill_host="::1")
    assert Sglang().prefill(fields(), at).fields["bootstrap_host"] == "[::1]"
    assert Sglang().prefill(fields(prompt=["a", "b"]), at).fields["bootstrap_host"] == ["[::1]"] * 2
    assert LlmD().decode(fields(), at).own_headers == {"x-prefiller-host-port": "[::1]:8000"}


@pytest.mark.parametrize("engine", [name for name in PLANS if name not in ("sglang", "store")])
def test_several_prompts_at_once_are_refused_where_one_transfer_serves_one(engine):
    with pytest.raises(InvalidRequest, match="list of prompts"):
        PLANS[engine]().check(fields(prompt=["a", "b"]))


def test_a_prefill_without_transfer_parameters_is_an_error_that_says_what_to_set():
    with pytest.raises(UpstreamError, match="--kv-transfer-config"):
        VllmPull().decode(fields(), attempt(), fields(choices=[]))


def test_mooncake_without_a_rank_names_its_bootstrap_address():
    with pytest.raises(UpstreamError, match=r"http://\[::1\]:8998"):
        VllmMooncake().prefill(fields(), attempt(prefill_host="::1"))


# ------------------------------------------------------------------------------------------------------------ answers


def test_pd_11_every_usage_of_an_answer_is_prefills():
    data = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}})
    told = json.loads(tidied(data.encode(), PrefillUsage(2)))
    assert told["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}}
    unknown = json.loads(tidied(data.encode(), PrefillUsage()))
    assert unknown["usage"] == {"prompt_tokens": 9, "prompt_tokens_details": None}


@pytest.mark.parametrize(
    "data",
    [b'{"choices":[{"delta":{"content":"a"}}]}', b'{"usage":null,"choices":[]}', b'{"usage": oops', b"[1]", b"hello"],
)
def test_what_says_no_usage_stays_the_servers_bytes(data):
    assert tidied(data, PrefillUsage(2)) is data


def test_where_a_server_says_no_details_prefills_are_added():
    told = json.loads(tidied(b'{"usage":{"prompt_tokens":9}}', PrefillUsage(2)))
    assert told == {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}}}
    assert json.loads(tidied(b'{"usage":{"prompt_tokens":9}}', PrefillUsage())) == {"usage": {"prompt_tokens": 9}}


def test_text_that_quotes_an_error_is_no_error():
    frame = {"choices": [{"delta": {"content": '"finish_reason": "error"'}, "finish_reason": None}]}
    data = json.dumps(frame).encode()
    assert tidied(data, PrefillUsage()) is data
    with pytest.raises(UpstreamError, match="could not load"):
        tidied(b'{"choices":[{"delta":{},"finish_reason": "error"}]}', PrefillUsage())


def test_comments_and_the_end_mark_pass_as_they_are():
    frames = SseScanner().feed(b': ping\n\ndata: [DONE]\n\ndata: {"a":1}\n\n')
    assert [tidied_frame(frame, PrefillUsage(1)) for frame in frames] == [frame.raw for frame in frames]


@pytest.mark.parametrize(
    ("body", "cached"),
    [
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":5}}}', 5),
        (b'{"usage":{"prompt_tokens_details":null}}', None),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}', None),
        (b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens_details":{"cached_tokens":6}}}\n\n', 6),
        (b"nonsense", None),
    ],
)
def test_prefills_usage_is_read_from_either_form(body, cached):
    assert prefill_usage(body) == PrefillUsage(cached)


def test_a_whole_answer_becomes_the_stream_that_was_asked_for():
    whole = {"id": "a", "object": "chat.completion", "model": "m", "usage": {"prompt_tokens": 1}}
    whole["choices"] = [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]
    data = [
        frame.data
        for frame in SseScanner().feed(as_stream(json.dumps(whole).encode(), is_chat=True, include_usage=True))
    ]
    first, usage = json.loads(data[0] or b""), json.loads(data[1] or b"")
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]
    assert (usage["choices"], usage["usage"], data[2]) == ([], {"prompt_tokens": 1}, b"[DONE]")


def test_a_tool_call_of_a_whole_answer_says_in_the_stream_which_one_it_is():
    message = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
    first = SseScanner().feed(as_stream(body, is_chat=True, include_usage=False))[0]
    delta = json.loads(first.data or b"")["choices"][0]["delta"]
    assert delta["tool_calls"] == [{"index": 0, "id": "a"}, {"index": 1, "id": "b"}]


# -------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"])
async def test_every_name_of_this_host_is_one_address(host):
    assert await _addresses(URL(f"http://{host}:8000/a/")) == {("loopback", 8000, "/a")}


def test_servers_that_say_nothing_are_not_refused():
    assert mismatch("vllm", ServerFacts(), ServerFacts()) is None


def test_two_names_of_one_address_are_one_server():
    one = ServerFacts(addresses=frozenset({("10.0.0.1", 8000, "")}))
    two = ServerFacts(addresses=frozenset({("10.0.0.1", 8000, ""), ("10.0.0.2", 8000, "")}))
    other_path = ServerFacts(addresses=frozenset({("10.0.0.1", 8000, "/decode")}))
    assert "same server" in (mismatch("vllm", one, two) or "")
    assert mismatch("vllm", one, other_path) is None


def test_host_names_that_lead_to_one_proxy_are_two_servers_if_their_births_or_sides_differ():
    place = frozenset({("10.0.0.1", 443, "")})
    births = [ServerFacts(addresses=place, birth=(1.0, i)) for i in (1.0, 2.0)]
    sides = [ServerFacts(addresses=place, mode=mode) for mode in ("prefill", "decode")]
    assert mismatch("vllm", *births) is None
    assert mismatch("sglang", *sides) is None


@pytest.mark.parametrize(
    ("engine", "prefill", "decode", "is_refused"),
    [
        ("vllm", "auto", "auto", False),
        ("vllm", "auto", "bfloat16", True),  # vLLM itself compares the words
        ("vllm", "fp8", None, False),
        ("sglang", "auto", "bfloat16", False),
        ("sglang", "bfloat16", "float16", True),
        ("sglang", "auto", "fp8_e4m3", True),
    ],
)
def test_kv_dtypes_are_compared_as_the_engines_do(engine, prefill, decode, is_refused):
    problem = mismatch(engine, ServerFacts(kv_dtype=prefill), ServerFacts(kv_dtype=decode))
    assert (problem is not None) is is_refused
    assert problem is None or problem == f"KV dtype: prefill has {prefill}, decode has {decode}; they must be equal"


def test_vllms_kv_dtype_is_read_off_its_metrics():
    line = 'vllm:cache_config_info{block_size="16",mamba_cache_dtype="x",cache_dtype="fp8_e4m3",engine=""} 1.0'
    assert read_cache_dtype(f"# HELP vllm:cache_config_info x\na 1\n{line}\n") == "fp8_e4m3"
    assert read_cache_dtype('vllm:cache_config_info{cache_dtype="auto"} 1.0') == "auto"
    assert read_cache_dtype('vllm:cache_config_info{mamba_cache_dtype="x"} 1.0\nother{cache_dtype="y"} 1') is None


@pytest.mark.parametrize("said", [None, [], {"data": 5}, {"data": [{"id": 5}, "x"]}, "text"])
def test_nonsense_of_a_server_is_nothing_known(said):
    assert model_facts(said) == {"models": frozenset(), "owner": None}
    assert sglang_facts(said) == {}
    assert mooncake_ranks(said) == ()


def test_ranks_of_mooncake_are_those_that_name_an_engine():
    ranks = mooncake_ranks({"0": {"engine_id": "a", "worker_addr": "x"}, "1": {}, "2": None})
    assert [(rank.rank, rank.engine_id) for rank in ranks] == [("0", "a")]


def test_figures_of_both_engines_have_the_same_names():
    vllm = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a b} c"} 2.0
vllm:num_requests_running{engine="1",model_name="a b} c"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:prefix_cache_queries_total{engine="0"} 1e3
vllm:nixl_bytes_transferred_sum{engine="0"} 4096
"""
    sglang = 'sglang:num_running_reqs{m="x"} 3\nsglang:token_usage{m="x"} 0.5\nsglang:prompt_tokens_total{m="x"} 1000\n'
    assert read_figures(vllm) == PdFigures(
        num_running=3, kv_usage=0.5, prefix_query_tokens=1000, transferred_bytes=4096
    )
    assert read_figures(sglang) == PdFigures(num_running=3, kv_usage=0.5, prefix_query_tokens=1000)
    assert read_figures("nonsense {\nx NaNs\nsglang:token_usage +Inf") == PdFigures()


# ------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    "said",
    [{}, {"messages": "x"}, {"messages": [1]}, {"prompt": 5}, {"prompt": [[1, 2]]}, {"prompt": ["a"]}, {"model": 3}],
)
def test_any_prompt_can_be_chosen_by(said):
    assert choice_request(fields(**said), "r", None).request_id == "r"


def test_a_key_that_shares_no_prefixes_gets_its_own_salt_and_a_clients_within_it():
    strategy = CacheStrategy(CacheMode.SPLIT, StrategySource.HEADER, cache_salt="ann")
    assert salted(fields(), strategy)["cache_salt"] == "ann"
    assert salted(fields(cache_salt="x"), strategy)["cache_salt"] == "3:ann:x"
    plain = fields(cache_salt="x")
    assert salted(plain, CacheStrategy(CacheMode.SPLIT, StrategySource.HEADER)) is plain


# ---------------------------------------------------------------------------------------------------------- admission


def any_of(*names: str) -> Callable[[Callable[[str], bool]], str | None]:
    return lambda has_room: next((name for name in names if has_room(name)), None)


def admission(**changed: float) -> Admission:
    return Admission("decode", **{"max_running": 1, "max_waiting": 2, "timeout_seconds": 5.0, **changed})  # type: ignore[arg-type]


async def test_places_go_to_those_who_wait_in_order():
    doors, order = admission(), []
    first = await doors.enter(any_of("a"))

    async def wait(name: str) -> None:
        slot = await doors.enter(any_of("a"))
        order.append(name)
        slot.release()

    waiting = [asyncio.create_task(wait(name)) for name in ("one", "two")]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await doors.enter(any_of("a"))
    assert refused.value.retry_after_seconds
    first.release()
    first.release()  # does nothing more
    await asyncio.gather(*waiting)
    assert (order, doors.num_running("a"), doors.num_waiting) == (["one", "two"], 0, 0)


async def test_who_waits_for_one_server_holds_up_nobody_and_is_not_overtaken_there():
    doors, order = admission(max_waiting=9), []
    slots = {name: await doors.enter(any_of(name)) for name in ("a", "b")}

    async def wait(who: str, *names: str) -> None:
        slot = await doors.enter(any_of(*names), is_particular=len(names) == 1)
        order.append((who, slot.name))

    wishes = (("pinned", "b"), ("any", "a", "b"), ("pinned too", "b"))
    waiting = [asyncio.create_task(wait(*wish)) for wish in wishes]
    await asyncio.sleep(0)
    slots["a"].release()
    await waiting[1]
    slots["b"].release()
    await waiting[0]
    assert (order, doors.num_waiting) == ([("any", "a"), ("pinned", "b")], 1)
    doors.give_back("a")
    assert (await doors.enter(any_of("b", "a"))).name == "a"  # the one who waits could not have it
    doors.give_back("b")
    await waiting[2]
    assert order[2:] == [("pinned too", "b")]


async def test_whoever_leaves_just_as_a_place_comes_gives_it_on():
    doors = admission()
    slot = await doors.enter(any_of("a"))
    leaving, staying = (asyncio.create_task(doors.enter(any_of("a"))) for _ in range(2))
    await asyncio.sleep(0)
    slot.release()  # the place is the first one's now
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    (await staying).release()
    assert doors.num_running("a") == 0


async def test_a_wait_ends_with_an_error_when_no_server_is_left():
    doors, is_up = admission(), True

    def choose(has_room: Callable[[str], bool]) -> str | None:
        if not is_up:
            raise ModeUnavailable("gone")
        return "a" if has_room("a") else None

    slot = await doors.enter(choose)
    waiting = asyncio.create_task(doors.enter(choose))
    await asyncio.sleep(0)
    is_up = False
    doors.serve()
    with pytest.raises(ModeUnavailable):
        await waiting
    slot.release()


async def test_a_wait_that_is_too_long_is_overload():
    doors = admission(timeout_seconds=0.01)
    slot = await doors.enter(any_of("a"))
    with pytest.raises(Overloaded, match="No decode server had room"):
        await doors.enter(any_of("a"))
    slot.release()
    (await doors.enter(any_of("a"))).release()


@given(st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=40))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_places_are_never_lost_nor_given_twice(steps):
    async def play() -> None:
        doors = admission(max_running=2, max_waiting=3)
        inside, asking = [], []
        for step in steps:
            if step == "enter":
                asking.append(asyncio.create_task(doors.enter(any_of("a", "b"))))
            elif step == "leave" and inside:
                inside.pop(0).release()
            elif step == "cancel" and asking:
                asking.pop().cancel()
            await asyncio.sleep(0)
            for task in [task for task in asking if task.done()]:
                asking.remove(task)
                if not task.cancelled() and task.exception() is None:
                    inside.append(task.result())
            assert doors.num_running("a") <= 2
            assert doors.num_running("b") <= 2
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for slot in inside:
            slot.release()
        assert doors.num_running("a") == doors.num_running("b") == 0

    asyncio.run(play())
