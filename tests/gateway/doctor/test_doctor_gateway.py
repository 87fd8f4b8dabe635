"""`kvgate doctor`: the gateway is asked for its state, and every fault becomes a finding with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from doctor_fake_gateway import FakeGateway, running

from gateway.clients.client import Api
from gateway.core.types import CacheMode
from gateway.doctor import client_checks
from gateway.doctor.answer import Answer, Event
from gateway.doctor.examination import examine_gateway, new_session
from gateway.doctor.fetch import Ask, fetch
from gateway.doctor.finding import Finding, Level
from gateway.doctor.gateway_checks import check_models, check_ready
from gateway.doctor.stream_checks import check_silence, num_heartbeats


async def examined(gateway: FakeGateway, *modes: CacheMode) -> list[Finding]:
    async with running(gateway), new_session() as session:
        return await examine_gateway(session, gateway.url, "k", modes, 10.0)


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is not Level.OK]


async def test_a_good_gateway_is_tried_in_each_of_its_modes():
    gateway = FakeGateway()
    findings = await examined(gateway)
    assert bad(findings) == []
    assert [turn.headers["X-Cache-Mode"] for turn in gateway.turns()] == ["merged", "split"]
    assert findings[0].what == f"the gateway answers at {gateway.url}: kvgate 1.2.3"
    assert any("1 heartbeats" in finding.what for finding in findings)


async def test_only_the_named_mode_is_tried():
    gateway = FakeGateway()
    await examined(gateway, CacheMode.SPLIT)
    assert [turn.headers["X-Cache-Mode"] for turn in gateway.turns()] == ["split"]


def put(**fields: Any) -> Callable[[FakeGateway], None]:
    def change(gateway: FakeGateway) -> None:
        for name, value in fields.items():
            setattr(gateway, name, value)

    return change


def ready(**fields: Any) -> Callable[[FakeGateway], None]:
    return lambda gateway: gateway.ready.update(fields)


def target(**fields: Any) -> Callable[[FakeGateway], None]:
    return lambda gateway: gateway.ready["targets"]["local"].update(fields)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        (put(health={"status": "ok"}), Level.PROBLEM, "no kvgate gateway"),
        (put(models=[]), Level.PROBLEM, "no model is listed"),
        (put(key="sk-other"), Level.PROBLEM, "the key is not one of the gateway's"),
        (put(served_mode="unknown"), Level.WARNING, "doesn't say which mode"),
        (put(engines={"merged": {"num_preemptions": 3}}), Level.WARNING, "preempted requests 3 times"),
        (
            put(engines={"merged": {"prefix_query_tokens": 10_000, "prefix_hit_tokens": 100}}),
            Level.WARNING,
            "found 1 % of 10000 prompt tokens",
        ),
        (ready(ready=False), Level.PROBLEM, "not ready"),
        (ready(notices=["kv_cache.x has no effect"]), Level.WARNING, "settings: kv_cache.x has no effect"),
        (target(reachable=False), Level.PROBLEM, "the upstream local can't be reached"),
        (
            target(instances=[{"name": "decode", "state": "failed", "reason": "gone"}]),
            Level.PROBLEM,
            "the instance decode is failed",
        ),
        (
            target(pairs=[{"prefill": "p", "decode": "d", "connected": True, "same_device": True}]),
            Level.WARNING,
            "p and d are on one device",
        ),
        (
            target(pairs=[{"prefill": "p", "decode": "d", "connected": False, "same_device": None}]),
            Level.PROBLEM,
            "not connected",
        ),
    ],
)
async def test_every_fault_is_found_and_says_what_to_do(
    change: Callable[[FakeGateway], None], level: Level, words: str
):
    gateway = FakeGateway()
    change(gateway)
    findings = [finding for finding in bad(await examined(gateway)) if words in finding.what]
    assert findings
    assert findings[0].level is level
    assert findings[0].what_to_do or words.startswith("settings")


async def test_nobody_at_the_address_is_one_problem_and_ends_the_examination():
    async with new_session() as session:
        (finding,) = await examine_gateway(session, "http://127.0.0.1:1", "k", (), 10.0)
    assert finding.level is Level.PROBLEM
    assert "kvgate serve" in finding.what_to_do


async def test_an_answer_without_end_is_given_up_in_time():
    async with running(FakeGateway(never_ends=True)) as gateway, new_session() as session:
        answer = await fetch(session, Ask("POST", f"{gateway.url}/v1/chat/completions", {}, {}), 0.2)
    assert answer.failure == "no end of the answer within 0.2 s"
    assert answer.status == 200
    assert answer.events[-1].data == "[DONE]"


def test_long_silences_are_warned_about():
    assert [one.level for one in check_silence(Answer(first_byte_seconds=61.0))] == [Level.WARNING]
    assert [one.level for one in check_silence(Answer(longest_silence_seconds=31.0))] == [Level.WARNING]
    assert list(check_silence(Answer(first_byte_seconds=5.0, longest_silence_seconds=6.0))) == []


def test_events_at_the_beginning_are_no_heartbeats():
    def event(at_seconds: float, name: str) -> Event:
        return Event(at_seconds, name, "{}")

    messages = (event(0.1, "message_start"), event(0.1, "ping"), event(5.1, "ping"), event(5.2, "message_stop"))
    assert num_heartbeats(Answer(events=messages), Api.MESSAGES) == 1
    responses = (event(0.1, "response.created"), event(0.1, "response.in_progress"), event(5.1, "response.in_progress"))
    assert num_heartbeats(Answer(events=responses), Api.RESPONSES) == 1
    assert num_heartbeats(Answer(num_comments=2), Api.CHAT) == 2


def test_a_proxy_in_the_environment_is_warned_about_unless_the_host_is_excepted():
    def found(**environ: str) -> list[Finding]:
        return list(client_checks.check_proxies(environ, "127.0.0.1"))

    assert found() == []
    assert len(found(HTTP_PROXY="http://proxy:1")) == 1
    assert len(found(http_proxy="http://proxy:1", NO_PROXY="localhost")) == 1
    assert found(HTTP_PROXY="http://proxy:1", no_proxy="localhost, 127.0.0.1") == []
    assert found(HTTP_PROXY="http://proxy:1", NO_PROXY="*") == []


def test_servers_of_pairs_that_are_down_double_or_do_not_fit_are_problems_with_both_values():
    problem = "KV dtype: prefill has auto, decode has fp8; they must be equal"
    servers = [
        {"name": "prefill-0", "url": "http://a", "state": "up", "problem": None},
        {"name": "decode-0", "url": "http://b", "state": "down", "problem": None},
        {"name": "decode-1", "url": "http://c", "state": "up", "problem": "it is the same server as decode-0"},
    ]
    pairs = [{"prefill": "prefill-0", "decode": "decode-0", "checked": True, "problem": problem}]
    target = {"kind": "pair", "reachable": True, "servers": servers, "pairs": pairs}
    body = {"ready": True, "default_mode": "split", "modes": {}, "targets": {"far": target}}
    found = bad(list(check_ready(Answer(200, {}, json.dumps(body).encode()))))
    assert [finding.what for finding in found] == [
        "decode-0 at http://b is down",
        "decode-1 at http://c is not used",
        "split: prefill-0 and decode-0 are no pair",
    ]
    assert (found[1].why, found[2].why) == ("it is the same server as decode-0", problem)
    assert all(finding.what_to_do for finding in found)


def test_a_pair_whose_servers_are_all_down_is_told_once_for_each_server():
    servers = [{"name": "prefill-0", "url": "http://a", "state": "down", "problem": None}]
    body = {"ready": True, "targets": {"far": {"kind": "pair", "reachable": False, "servers": servers}}}
    found = bad(list(check_ready(Answer(200, {}, json.dumps(body).encode()))))
    assert [finding.what for finding in found] == ["prefill-0 at http://a is down"]


def test_an_empty_list_of_models_says_why():
    (found,) = check_models(Answer(200, {}, b'{"data": []}'))
    assert found.why == "no target says what it serves"
