"""Connections of clients and to upstreams: what no proxy may read in two ways, and many that break off."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp.web_protocol
import pytest
from aiohttp.http_parser import HttpRequestParserPy
from web_support import DONE, ROLE, Hold, Seen, Step, chunk, fake_upstream, local_settings, running, sse_answer
from web_support import upstream_settings as settings_for

from gateway.upstreams.scripted import ScriptedUpstream
from support.waiting import until

BODY = b'{"messages":[{"role":"user","content":"hi"}]}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NEXT = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY
SIZE = b"%x" % len(BODY)
LENGTH = b"%d" % len(BODY)
PARSERS = {"compiled": aiohttp.web_protocol.HttpRequestParser, "python": HttpRequestParserPy}


def by_length(*headers: bytes) -> bytes:
    return HEAD + b"\r\n".join(headers) + b"\r\n\r\n" + BODY


def by_chunks(*headers: bytes, size: bytes = SIZE, end: bytes = b"\r\n") -> bytes:
    headers = headers or (b"Transfer-Encoding: chunked",)
    return HEAD + b"\r\n".join(headers) + b"\r\n\r\n" + size + b"\r\n" + BODY + end + b"0\r\n\r\n"


AMBIGUOUS = {
    "a length, then chunks": by_chunks(b"Content-Length: 4", b"Transfer-Encoding: chunked"),
    "chunks, then a length": by_chunks(b"Transfer-Encoding: chunked", b"Content-Length: " + LENGTH),
    "two lengths": by_length(b"Content-Length: " + LENGTH, b"Content-Length: 5"),
    "a list of lengths": by_length(b"Content-Length: %b, 5" % LENGTH),
    "a length with a sign": by_length(b"Content-Length: +" + LENGTH),
    "a length below zero": by_length(b"Content-Length: -" + LENGTH),
    "a length with an underscore": by_length(b"Content-Length: 4_5"),
    "a length in hex": by_length(b"Content-Length: 0x2d"),
    "a blank before the colon": by_chunks(b"Transfer-Encoding : chunked"),
    "an unknown coding": by_chunks(b"Transfer-Encoding: chunked123"),
    "a coding behind chunked": by_chunks(b"Transfer-Encoding: chunked, identity"),
    "chunked twice": by_chunks(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "a line feed in an extension": by_chunks(size=SIZE + b";a\nb"),
    "a chunk size with a sign": by_chunks(size=b"+" + SIZE),
    "a chunk size with 0x": by_chunks(size=b"0x" + SIZE),
    "a chunk without its end": by_chunks(end=b"XX"),
    "a folded header": by_length(b"X-A: b\r\n Content-Length: 3", b"Content-Length: " + LENGTH),
    "a folded coding": by_chunks(b"Transfer-Encoding:\r\n chunked"),
    "a carriage return in a name": by_length(b"X\rY: 1", b"Content-Length: " + LENGTH),
    "a zero byte in a value": by_length(b"X: a\0b", b"Content-Length: " + LENGTH),
}


def statuses(answer: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.[01] (\d+) ", answer)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_ht_09_what_could_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_answered(
    name: str, parser: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(aiohttp.web_protocol, "HttpRequestParser", PARSERS[parser])
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.raw(AMBIGUOUS[name] + NEXT)  # read to its end: the connection is closed

    assert statuses(answer) == [b"400"]
    assert engine.requests == []


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "first", [by_length(b"Content-Length: " + LENGTH), by_chunks(), by_chunks(size=SIZE + b";a=b")]
)
async def test_ht_09_what_is_clear_is_answered_with_what_comes_behind_it(
    first: bytes, parser: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(aiohttp.web_protocol, "HttpRequestParser", PARSERS[parser])
    engine = ScriptedUpstream()
    async with running(local_settings(), engine) as gateway:
        answer = await gateway.raw(first + NEXT)

    assert statuses(answer) == [b"200", b"200"]
    assert len(engine.requests) == 2


async def test_ht_03_a_body_that_waits_for_leave_gets_it():
    """Expect: 100-continue, which curl sends with large bodies, is between this client and the gateway."""
    good = sse_answer(ROLE, chunk("a"), chunk(finish="stop"), DONE)
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    async with fake_upstream(good) as upstream, running(settings_for(upstream.url)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        async with asyncio.timeout(10):
            writer.write(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n" % len(body))
            writer.write(b"Connection: close\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(body)
            answer = await reader.read()
        writer.close()

    assert statuses(answer) == [b"200"]
    assert b"data: [DONE]" in answer
    assert upstream.seen[0].header("Expect") is None
    assert upstream.seen[0].header("Transfer-Encoding") is None
    assert upstream.seen[0].body


NUM_AT_ONCE, NUM_ROUNDS = 50, 10


async def test_ht_04_hundreds_of_clients_that_leave_in_the_middle_keep_no_connection():
    """Each upstream connection is closed with its client's, and the next request finds the way free."""

    def script(seen: Seen) -> list[Step]:
        if b"stay" in seen.body:
            return sse_answer(ROLE, chunk("a"), chunk(finish="stop"), DONE)
        return sse_answer(ROLE, chunk("a"), Hold())

    async with fake_upstream(script) as upstream, running(settings_for(upstream.url)) as gateway:
        for number in range(1, NUM_ROUNDS + 1):
            await asyncio.gather(*(leave_after_text(gateway) for _ in range(NUM_AT_ONCE)))
            gone = number * NUM_AT_ONCE
            await until(lambda gone=gone: upstream.num_gone == gone, "the upstream saw every client go")
        answer = await gateway.chat(model="m", stream=True, messages=[{"role": "user", "content": "stay"}])
        in_flight = await gateway.metric("kvgate_requests_in_flight")

    assert (answer.text(), answer.done) == ("a", True)
    assert in_flight == 0


async def leave_after_text(gateway: Any) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}]}
    async with gateway.session.post(gateway.url + "/v1/chat/completions", json=body) as response:
        seen = b""
        while b'"a"' not in seen:
            seen += await response.content.readany()
