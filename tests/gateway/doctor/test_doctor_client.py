"""`kvgate doctor --client`: what a client is configured with is sent as the client sends it, and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from doctor_fake_gateway import FakeGateway, running, sse

from gateway.clients.catalog import FILE_CLIENTS
from gateway.clients.client import Client
from gateway.clients.connection import Connection
from gateway.clients.merging import merge, open_document
from gateway.clients.target import Limits, Target
from gateway.core.types import CacheMode
from gateway.doctor.examination import Patient, examine_client, examine_routes, new_session
from gateway.doctor.finding import Finding, Level

ALL = pytest.mark.parametrize("client", FILE_CLIENTS.values(), ids=list(FILE_CLIENTS))
# Path, smallest body in bytes and number of tools of each client's first request.
SENT: Mapping[str, tuple[str, int, int]] = {
    "cline": ("/v1/chat/completions", 18_000, 25),
    "claude": ("/v1/messages?beta=true", 70_000, 25),
    "codex": ("/v1/responses", 32_000, 9),
    "opencode": ("/v1/chat/completions", 28_000, 10),
    "continue": ("/v1/chat/completions", 6_000, 8),
    "gemini": ("/v1beta/models/smollm2:streamGenerateContent?alt=sse", 30_000, 1),
}


def configured(client: Client, url: str, mode: CacheMode | None = CacheMode.SPLIT, key: str = "sk-right") -> Connection:
    target = Target(url, key, "smollm2", mode, Limits(32768, 1024))
    plain = open_document(client.format, merge(client.format, "", client.entries(target)).text).plain()
    connection = client.read_back(plain, {})
    assert connection is not None
    return connection


async def examined(client: Client, connection: Connection, **wanted: object) -> list[Finding]:
    patient = replace(Patient(client, connection), **wanted)
    async with new_session() as session:
        return await examine_client(session, patient, {}, 10.0)


def bad(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.level is not Level.OK]


def problems(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.level is Level.PROBLEM]


@ALL
async def test_a_good_way_has_nothing_to_complain_about_and_is_tried_with_the_clients_own_request(client: Client):
    async with running(FakeGateway(key="sk-right")) as gateway:
        findings = await examined(client, configured(client, gateway.url))
    assert bad(findings) == []
    assert [one.what.split(":")[0] for one in findings] == ["mode split arrives (by header) and is served",
                                                          "streaming arrives"]  # fmt: skip
    (turn,) = gateway.turns()
    path, num_bytes, num_tools = SENT[client.name]
    assert turn.path == path
    assert num_bytes < turn.num_bytes < 2 * num_bytes
    assert len(turn.body["tools"]) == num_tools
    assert turn.headers["X-Cache-Mode"] == "split"
    assert client.name == "gemini" or turn.body["stream"] is True


async def test_claude_looks_at_the_bare_address_and_codex_says_its_version():
    async with running(FakeGateway()) as gateway:
        await examined(FILE_CLIENTS["claude"], configured(FILE_CLIENTS["claude"], gateway.url))
        await examined(FILE_CLIENTS["codex"], configured(FILE_CLIENTS["codex"], gateway.url))
    asked = [(one.method, one.path) for one in gateway.seen]
    assert ("HEAD", "/") in asked
    assert ("GET", "/v1/models?limit=1000") in asked
    assert ("GET", "/v1/models?client_version=0.171.0") in asked


@ALL
async def test_a_wrong_key_is_named_and_never_shown(client: Client):
    async with running(FakeGateway(key="sk-right")) as gateway:
        findings = await examined(client, configured(client, gateway.url, key="sk-wrong-0123456789"))
    assert any("401" in what for what in problems(findings))
    assert "sk-wrong-0123456789" not in str(findings)


async def test_a_mode_that_is_lost_on_the_way_is_found():
    cline = FILE_CLIENTS["cline"]
    async with running(FakeGateway(loses_mode_header=True)) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    assert problems(findings) == ["split was asked for and merged served"]
    async with running(FakeGateway(loses_mode_header=True, served_mode="split")) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    assert bad(findings) == ["split served, but it was chosen by default, not by the header that the client sends"]


async def test_a_mode_that_is_wanted_but_not_configured_is_found():
    codex = FILE_CLIENTS["codex"]
    async with running(FakeGateway()) as gateway:
        findings = await examined(codex, configured(codex, gateway.url, None), wanted_mode=CacheMode.SPLIT)
        assert problems(findings) == ["Codex sends no mode, not split"]
        findings = await examined(codex, configured(codex, gateway.url, None))
    assert findings[0].what == "no mode is sent; the gateway's default served: merged"


async def test_a_prompt_beyond_the_context_is_a_problem_and_the_rest_is_still_checked():
    claude = FILE_CLIENTS["claude"]
    async with running(FakeGateway(max_bytes=10_000)) as gateway:
        findings = await examined(claude, configured(claude, gateway.url))
    (one,) = [finding for finding in findings if finding.level is Level.PROBLEM]
    assert "maximum context length" in one.what
    assert "max_model_len" in one.what_to_do
    assert [turn.num_bytes > 10_000 for turn in gateway.turns()] == [True, False]
    assert "mode split arrives (by header) and is served" in [finding.what for finding in findings]


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([sse({"choices": []})], "the stream ends without the event that ends chat completions"),
        ([sse({"error": {"message": "the engine is gone"}})], "the stream ends with an error: the engine is gone"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_a_problem(frames: list[bytes], what: str):
    cline = FILE_CLIENTS["cline"]
    async with running(FakeGateway(frames=frames)) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    assert problems(findings) == [what]


async def test_an_answer_that_is_no_stream_is_a_problem():
    cline = FILE_CLIENTS["cline"]
    async with running(FakeGateway(is_stream=False)) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    assert problems(findings) == ["no stream came, but application/json; charset=utf-8"]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "model_not_found", "--model"),
        (404, "", "base URL"),
        (429, "", "in 7 s"),
        (503, "", "in 7 s"),
        (529, "overloaded_error", "in 7 s"),
        (500, "", "log"),
        (400, "", "log"),
    ],
)
async def test_every_refusal_says_what_to_do(status: int, code: str, words: str):
    cline = FILE_CLIENTS["cline"]
    refusal = (status, {"error": {"message": "No.", "code": code}})
    async with running(FakeGateway(refusal=refusal)) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    (one,) = [finding for finding in findings if finding.level is Level.PROBLEM]
    assert f"HTTP {status}: No." in one.what
    assert words in one.what_to_do


async def test_nothing_is_sent_to_a_server_that_is_not_kvgate():
    cline = FILE_CLIENTS["cline"]
    async with running(FakeGateway(health={"status": "ok"})) as gateway:
        findings = await examined(cline, configured(cline, gateway.url))
    assert problems(findings) == [f"what answers at {gateway.url}/v1 is no kvgate gateway (/health: HTTP 200)"]
    assert [one.path for one in gateway.seen] == ["/health"]
    assert "Authorization" not in gateway.seen[0].headers


async def test_a_gateway_that_is_not_there_is_said():
    cline = FILE_CLIENTS["cline"]
    async with running(FakeGateway()) as gateway:
        connection = configured(cline, gateway.url)
    findings = await examined(cline, connection, wanted_url="http://127.0.0.1:1")
    assert len(problems(findings)) == 2
    assert "is pointed at" in problems(findings)[0]
    assert "Connection refused" in problems(findings)[1]


async def test_the_gateways_remarks_and_limits_are_passed_on():
    opencode = FILE_CLIENTS["opencode"]
    models = [{"id": "smollm2", "max_model_len": 1024}]
    async with running(FakeGateway(models=models, notice="chunk_size has no effect; second")) as gateway:
        findings = await examined(opencode, configured(opencode, gateway.url))
    whats = bad(findings)
    assert "the client believes that smollm2 holds 32768 tokens; it holds 1024" in whats
    assert "the client asks for 1024 tokens of answer; smollm2 holds 1024 in all" in whats
    assert whats[-2:] == ["the gateway remarks: chunk_size has no effect", "the gateway remarks: second"]


async def test_the_addresses_in_cc_switchs_links_carry_the_mode():
    async with running(FakeGateway()) as gateway, new_session() as session:
        found = await examine_routes(session, "cc-switch", Connection(gateway.url, "k"), CacheMode.SPLIT, 10.0)
    assert bad(found) == []
    assert [turn.path.partition("?")[0] for turn in gateway.turns()] == [
        "/v1/messages",
        "/split/v1/responses",
        "/split/v1/chat/completions",
        "/split/v1beta/models/smollm2:streamGenerateContent",
    ]
    assert "codex: mode split arrives (by path) and is served" in [finding.what for finding in found]


async def test_curl_sends_what_its_command_sends():
    async with running(FakeGateway()) as gateway, new_session() as session:
        found = await examine_routes(session, "curl", Connection(gateway.url, "k"), None, 10.0)
    assert bad(found) == []
    (turn,) = gateway.turns()
    assert "tools" not in turn.body
    assert "X-Cache-Mode" not in turn.headers
