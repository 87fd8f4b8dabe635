"""Upstreams that break the rules, byte for byte: each ends as an error or as the whole answer, never as half a one."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib

import brotli
import pytest
from web_answers import FAST, ONCE
from web_support import (
    DONE,
    ROLE,
    SSE_HEAD,
    Close,
    Flood,
    Hold,
    Reset,
    Seen,
    chunk,
    fake_upstream,
    http_answer,
    running,
    sse_answer,
    upstream_settings,
)

from gateway.core.codings import zstd
from gateway.settings.schema import Settings, TargetSettings, TimeoutSettings
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http.clients import HttpClients
from gateway.upstreams.http.openai_http import OpenAIHttpUpstream
from support.waiting import until

WHOLE = json.dumps(
    {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi" * 200}, "finish_reason": "stop"}]}
).encode()
PLAIN = http_answer(WHOLE)
SHORT = ROLE + chunk("h") + chunk("i") + chunk(finish="stop") + DONE


async def ask(*steps, stream=True, place="chat/completions", retry=ONCE, timeouts=None):
    """One request to an upstream that plays the steps."""
    prompt = {"input": "hi"} if place == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    limits = {"max_tokens": 5} if place == "messages" else {}
    body = {"model": "m", "stream": stream, **prompt, **limits}
    async with (
        fake_upstream(list(steps)) as upstream,
        running(upstream_settings(upstream.url, retry=retry, timeouts=timeouts or TimeoutSettings())) as gateway,
    ):
        answer = await gateway.post(f"/v1/{place}", body)
        record = await gateway.record(answer)
    return answer, record, upstream


CLEAN_ENDS = {
    "chat/completions": (b"[DONE]",),
    "messages": (b"message_stop", b"end_turn"),
    "responses": (b"response.completed",),
}


def is_whole(answer, place):
    return answer.status == 200 and any(end in answer.body for end in CLEAN_ENDS[place])


# ------------------------------------------------------------------------------------------------------------ cut short


@pytest.mark.parametrize(
    ("place", "how", "step"),
    [
        ("chat/completions", "close", 1),
        ("chat/completions", "reset", 7),
        ("messages", "close", 7),
        ("responses", "close", 7),
    ],
)
async def test_st_10_a_stream_cut_at_any_byte_is_an_error_or_whole_and_never_a_false_whole(place, how, step):
    """Whole it is from the finish reason on. One gateway for all offsets."""
    stream = SSE_HEAD + b"\r\n" + SHORT
    end_mark = b'"finish_reason": "stop"'
    told_the_end = stream.index(end_mark) + len(end_mark) + len("}]}")
    prompt = {"input": "hi"} if place == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "m", "stream": True, "max_output_tokens" if place == "responses" else "max_tokens": 16, **prompt}
    cuts = [[stream[:cut_at], Reset() if how == "reset" else Close()] for cut_at in range(1, len(stream), step)]
    async with fake_upstream(in_turn(cuts)) as upstream, running(never_left_alone(upstream)) as gateway:
        for cut_at in range(1, len(stream), step):
            answer = await gateway.post(f"/v1/{place}", body)
            whole = is_whole(answer, place)
            assert whole is (outcome_of(gateway, answer) == "ok"), cut_at
            assert whole or b"error" in answer.body, cut_at
            assert answer.status in (200, 502), cut_at
            if how == "close":
                assert whole is (cut_at >= told_the_end), cut_at
            assert not whole or cut_at >= told_the_end, cut_at


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_st_10_an_answer_in_one_piece_cut_at_any_byte_is_an_error(framing):
    body = WHOLE.replace(b"hi" * 200, b"hi")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
    raw = {
        "length": head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        "chunked": head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        "close": head + b"\r\n" + body,
    }[framing]
    cuts = [[raw[:cut_at], Close()] for cut_at in range(1, len(raw), 3)]
    async with fake_upstream(in_turn(cuts)) as upstream, running(never_left_alone(upstream)) as gateway:
        for _ in cuts:
            answer = await gateway.chat(model="m")
            assert (answer.status, outcome_of(gateway, answer)) == (502, "error")


async def test_st_10_a_cut_answer_nested_too_deeply_to_be_read_is_an_error():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    answer, _, _ = await ask(head + b'{"a":' * 100_000, stream=False)
    assert (answer.status, answer.error["code"]) == (502, "upstream_gone")


def in_turn(scripts):
    left = iter(scripts)
    return lambda _seen: next(left)


def never_left_alone(upstream):
    target = TargetSettings(name="a", base_url=upstream.url, models=("m",), breaker_failures=0)
    return Settings(targets=(target,), retry=ONCE)


def outcome_of(gateway, answer):
    return gateway.records.get(answer.headers["X-Request-Id"]).outcome


# ------------------------------------------------------------------------------------------------------------- silence


async def test_st_23_a_black_hole_is_a_504_in_time_and_is_hung_up_on():
    timeouts = TimeoutSettings(first_byte_seconds=0.05)
    answer, record, upstream = await ask(Hold(), stream=True, timeouts=timeouts)
    assert (answer.status, answer.error["code"], record["outcome"]) == (504, "upstream_timeout", "timeout")
    assert upstream.num_gone == 1


async def test_an_attempt_that_got_no_answer_is_hung_up_on_before_the_next_one():
    timeouts = TimeoutSettings(first_byte_seconds=0.05)
    answer, record, upstream = await ask(Hold(), retry=FAST, timeouts=timeouts)
    assert (answer.status, answer.headers["X-Kvgate-Attempts"]) == (504, "3")
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["timeout"] * 3
    assert (len(upstream.seen), upstream.num_gone) == (3, 3)


async def test_a_host_that_takes_no_connection_is_a_504_of_its_own_limit():
    """A listener whose queue is full: the kernel drops what comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        timeouts = TimeoutSettings(connect_seconds=0.1, first_byte_seconds=60)
        async with running(upstream_settings(f"http://127.0.0.1:{port}", retry=ONCE, timeouts=timeouts)) as gateway:
            answer = await gateway.chat(model="m")
        for filler in fillers:
            filler.close()
    assert answer.status == 504
    assert "took no connection within 0.1 s" in answer.error["message"]


@pytest.mark.parametrize("place", list(CLEAN_ENDS))
async def test_st_23_silence_within_a_stream_is_its_api_s_error(place):
    timeouts = TimeoutSettings(idle_seconds=0.05)
    answer, record, upstream = await ask(*sse_answer(ROLE, chunk("hi"), Hold()), place=place, timeouts=timeouts)
    assert answer.status == 200
    assert b"silent" in answer.body
    assert not is_whole(answer, place)
    assert (record["outcome"], upstream.num_gone) == ("timeout", 1)


# ----------------------------------------------------------------------------------------------------- too much of it


async def test_endless_headers_are_given_up():
    flood = Flood(b"X-A: " + b"a" * 1000 + b"\r\n")
    answer, _, upstream = await ask(b"HTTP/1.1 200 OK\r\n", flood)
    assert answer.status == 502
    assert "not valid HTTP" in answer.error["message"]
    await until(lambda: upstream.num_gone)
    assert flood.num_sent < 16 * 1024**2


async def test_one_endless_header_is_given_up():
    flood = Flood(b"a" * 65536)
    answer, _, _ = await ask(b"HTTP/1.1 200 OK\r\nX-A: ", flood)
    assert answer.status == 502
    assert flood.num_sent < 32 * 1024**2


async def test_endless_1xx_answers_end_at_the_first_byte_limit():
    flood = Flood(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20)
    answer, _, _ = await ask(flood, timeouts=TimeoutSettings(first_byte_seconds=0.3))
    assert answer.status in (502, 504)


async def test_a_1xx_answer_is_not_the_answer():
    answer, _, _ = await ask(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n", *PLAIN, stream=False
    )
    assert (answer.status, answer.body) == (200, WHOLE)


@pytest.mark.parametrize("place", ["chat/completions", "messages"])
async def test_st_09_a_line_without_end_is_an_error_event_and_memory_has_a_limit(place):
    flood = Flood(b"x" * 65536)
    steps = sse_answer(ROLE, chunk("hi"), b'data: {"choices":[{"delta":{"content":"', flood)
    answer, record, _ = await ask(*steps, place=place)
    assert answer.status == 200
    assert b"longer than" in answer.body
    assert not is_whole(answer, place)
    assert record["outcome"] == "error"
    assert flood.num_sent < 2 * 64 * 1024**2


async def test_an_answer_in_one_piece_without_end_is_given_up():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    flood = Flood(b" " * 2**20)
    answer, _, _ = await ask(head + b"{", flood, stream=False)
    assert (answer.status, answer.error["code"]) == (502, "upstream_gone")
    assert "longer than 64 MiB" in answer.error["message"]
    assert flood.num_sent < 2 * 64 * 1024**2


async def test_an_error_page_without_end_is_read_only_so_far():
    head = b"HTTP/1.1 500 No\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>"
    flood = Flood(b"<p>" * 20000)
    answer, _, _ = await ask(head, flood)
    assert (answer.status, answer.error["type"]) == (500, "upstream_error")
    assert flood.num_sent < 32 * 1024**2


@pytest.mark.parametrize("stream", [True, False])
async def test_what_grows_a_thousandfold_is_given_up_in_time(stream):
    """Half a megabyte that becomes half a gigabyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    prefix = b'data: {"a":"' if stream else b'{"a":"'
    bomb = packer.compress(prefix) + b"".join(packer.compress(b"a" * 2**20) for _ in range(300)) + packer.flush()
    kind = "text/event-stream" if stream else "application/json"
    answer, _, _ = await ask(*http_answer(bomb, content_type=kind, extra="Content-Encoding: gzip\r\n"), stream=stream)
    assert answer.status == 502
    assert "longer than" in answer.error["message"]


async def standstill(flood: Flood) -> int:
    """How much was sent once no more is: gateway, upstream and client share this loop, and whoever can go on does."""
    async with asyncio.timeout(20):
        num_turns, seen = 0, -1
        while num_turns < 1000:
            num_turns, seen = (num_turns + 1 if seen == flood.num_sent else 0), flood.num_sent
            await asyncio.sleep(0)
    return seen


async def test_a_client_that_does_not_read_slows_its_upstream_down():
    """Back-pressure from end to end: what nobody reads is not kept here."""
    flood = Flood(chunk("x" * 60_000))
    async with (
        fake_upstream(sse_answer(ROLE, flood)) as upstream,
        running(upstream_settings(upstream.url)) as gateway,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readexactly(200)
        stalled_at = await standstill(flood)
        writer.transport.abort()
        await until(lambda: upstream.num_gone)
    assert 0 < stalled_at < 32 * 1024**2


# ----------------------------------------------------------------------------------------------------------- bad HTTP


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot-hex\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_no_http_is_a_502(raw, stream):
    answer, record, _ = await ask(raw, Reset(), stream=stream)
    assert answer.status == 502
    assert record["outcome"] == "error"


@pytest.mark.parametrize("place", list(CLEAN_ENDS))
async def test_a_chunk_that_is_no_chunk_is_an_error_event(place):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    good = ROLE + chunk("hi")
    answer, record, _ = await ask(head + b"%x\r\n" % len(good) + good + b"\r\nzz\r\n", Hold(), place=place)
    assert answer.status in (200, 502)  # the good chunk is lost if it came in one read with the bad one
    assert b"error" in answer.body
    assert not is_whole(answer, place)
    assert record["outcome"] == "error"


async def test_garbage_behind_an_answer_reaches_neither_this_client_nor_the_next():
    tail = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    script = [PLAIN[0] + tail]
    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url, retry=ONCE)) as gateway:
        answers = [await gateway.chat(model="m") for _ in range(3)]
    assert [(answer.status, answer.body) for answer in answers] == [(200, WHOLE)] * 3
    assert upstream.num_connections == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_refused_and_not_tried_again(status, stream):
    raw = f"HTTP/1.1 {status}\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n".encode()
    answer, _, upstream = await ask(raw, stream=stream, retry=FAST)
    assert (answer.status, len(upstream.seen)) == (502, 1)
    assert "redirect" in answer.error["message"]


MALFORMED = [
    b"data: {\n\n",
    b"data: [1,2]\n\n",
    b'data: "x"\n\n',
    b"data: nul\n\n",
    b"\xff\xfe\n\n",
    b"data\n\n",
    b"\0\n\n",
]


@pytest.mark.parametrize("junk", MALFORMED)
@pytest.mark.parametrize("place", list(CLEAN_ENDS))
async def test_malformed_events_never_make_a_false_whole(place, junk):
    """An answer that was not finished stays unfinished, and one that was is at least not made worse."""
    cut, record, _ = await ask(*sse_answer(ROLE, chunk("hi"), junk), place=place)
    assert not is_whole(cut, place)
    assert record["outcome"] == "error"
    answer, record, _ = await ask(*sse_answer(ROLE, chunk("hi"), junk, chunk(finish="stop"), DONE), place=place)
    assert is_whole(answer, place) is (record["outcome"] == "ok")
    assert is_whole(answer, place) or b"error" in answer.body


# ----------------------------------------------------------------------------------------------------------- compressed


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "gzip, br", "zstd, gzip"])
async def test_ht_01_compressed_although_it_was_asked_not_to(coding, stream):
    packers = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}
    data = SHORT if stream else WHOLE
    for name in coding.split(", "):
        data = packers[name](data)
    kind = "text/event-stream" if stream else "application/json"
    script = http_answer(data, content_type=kind, extra=f"Content-Encoding: {coding}\r\n")
    answer, record, upstream = await ask(*script, stream=stream)
    assert upstream.seen[0].header("Accept-Encoding") == "identity"
    assert (answer.status, record["outcome"]) == (200, "ok")
    assert "Content-Encoding" not in answer.headers
    assert answer.text() == "hi" if stream else answer.body == WHOLE


@pytest.mark.parametrize("stream", [True, False])
async def test_ht_01_a_coding_that_is_not_known_is_an_error_that_names_it(stream):
    kind = "text/event-stream" if stream else "application/json"
    script = http_answer(b"\x1f\x9d\x90 what", content_type=kind, extra="Content-Encoding: compress\r\n")
    answer, _, _ = await ask(*script, stream=stream)
    assert answer.status == 502
    assert "'compress'" in answer.error["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd"])
async def test_ht_01_a_compressed_answer_that_ends_too_early_is_an_error(coding):
    packed = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}[coding](WHOLE)
    answer, _, _ = await ask(*http_answer(packed[:-4], extra=f"Content-Encoding: {coding}\r\n"), stream=False)
    assert (answer.status, answer.error["code"]) == (502, "upstream_gone")


# ---------------------------------------------------------------------------------------------------------- connections


async def test_a_pooled_connection_that_the_server_closes_as_it_is_used_costs_no_retry():
    """Though it is told: whether the server has seen the request, nobody can know."""
    answered = 0

    def script(_seen: Seen):
        nonlocal answered
        answered += 1
        return [Reset()] if answered == 2 else PLAIN

    async with fake_upstream(script) as upstream, running(upstream_settings(upstream.url, retry=ONCE)) as gateway:
        answers = [await gateway.chat(model="m") for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.headers.get("X-Kvgate-Attempts") for answer in answers] == [None, "2"]
    assert len(upstream.seen) == 3


async def test_a_fresh_connection_that_is_closed_without_an_answer_is_an_attempt():
    answer, _, upstream = await ask(Reset(), stream=False)
    assert (answer.status, len(upstream.seen)) == (502, 1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://no-such-host.invalid/v1", "the host name is not known"),
        ("http://127.0.0.1:1/v1", "Connect call failed"),
    ],
)
async def test_why_there_is_no_connection_is_told(url, words):
    async with running(upstream_settings(url, retry=ONCE)) as gateway:
        answer = await gateway.chat(model="m")
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert words in answer.error["message"]


async def test_https_to_a_server_that_speaks_http_is_told_and_not_tried_again():
    num_connections = 0

    async def handle(reader, writer):
        nonlocal num_connections
        num_connections += 1
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with running(upstream_settings(url, retry=FAST)) as gateway:
            answer = await gateway.chat(model="m")
    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert "does the server speak https" in answer.error["message"]
    assert num_connections == 1


async def test_an_ipv6_address_is_a_target_like_any_other():
    answered = asyncio.Event()

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN[0])
        answered.set()
        await reader.read()
        writer.close()

    try:
        server = await asyncio.start_server(handle, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with running(upstream_settings(f"http://[::1]:{port}/v1", retry=ONCE)) as gateway:
            answer = await gateway.chat(model="m")
    assert (answer.status, answered.is_set()) == (200, True)


# ------------------------------------------------------------------------------------------------------------- proxies


async def open_through(environment, url, upstream_key="sk-fake-0000"):
    """Send one request with this environment; the target's URL need not lead anywhere."""
    timeouts = TimeoutSettings(connect_seconds=2.0)
    clients = HttpClients(timeouts, environment)
    target = TargetSettings(name="t", base_url=url, api_key=upstream_key)
    upstream = OpenAIHttpUpstream(target, clients, timeouts, "hop")
    try:
        response = await upstream.open(RawRequest("/chat/completions", b"{}", {}, stream=False))
        await response.close()
        return response.status
    finally:
        await clients.close()


async def test_ht_12_a_proxy_of_the_environment_stands_before_remote_targets_only():
    async with fake_upstream(PLAIN) as proxy, fake_upstream(PLAIN) as direct:
        environment = {"http": f"http://user:pw@127.0.0.1:{proxy.port}", "no": "127.0.0.1.example"}
        assert await open_through(environment, "http://models.example/v1") == 200
        assert await open_through(environment, direct.url) == 200
        exempt = {**environment, "no": ".example"}
        with pytest.raises(Exception, match=r"host name is not known|reached"):
            await open_through(exempt, "http://models.example.invalid.example/v1")
    (seen,) = proxy.seen
    assert seen.path == "http://models.example/v1/chat/completions"
    assert seen.header("Proxy-Authorization").startswith("Basic ")
    assert direct.seen[0].header("Proxy-Authorization") is None


async def test_ht_12_a_proxy_that_is_not_spoken_is_named_and_costs_only_its_target():
    with pytest.raises(Exception, match="socks5h proxy"):
        await open_through({"all": "socks5h://127.0.0.1:9"}, "http://models.example/v1")


async def test_au_06_no_credentials_come_from_netrc(tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine models.example login me password sk-netrc-0000\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with fake_upstream(PLAIN) as proxy:
        environment = {"http": f"http://127.0.0.1:{proxy.port}"}
        await open_through(environment, "http://models.example/v1")
        await open_through(environment, "http://models.example/v1", upstream_key="")
    assert [seen.header("Authorization") for seen in proxy.seen] == ["Bearer sk-fake-0000", None]
