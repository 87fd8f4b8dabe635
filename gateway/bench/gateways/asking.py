"""One chat request, timed and checked. Whatever isn't the upstream's whole answer is an error, never a figure.

The check of every answer is a count of its words, so that it costs no time that a gateway would seem to take; answers
of the warm-up are read event by event.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from gateway.bench.answer import AnswerReader
from gateway.bench.client import refusal_message
from gateway.bench.failures import reason_of
from gateway.bench.gateways.sizes import WORD, Kind, request_body
from gateway.bench.process import BenchError
from gateway.bench.sse import SseParser

BODIES = {kind: request_body(kind) for kind in Kind}
END = b"data: [DONE]"
FIRST = {Kind.PLAIN: b"{", Kind.STREAM: WORD.strip()}  # what the first network read of interest holds
MAX_SHOWN = 300
CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Answer(NamedTuple):
    """Seconds after the request was begun."""

    first: float  # the first word of a stream, the first byte of a plain answer
    whole: float


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where requests go, and what goes with them."""

    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Client:
    """The same for every place."""

    session: aiohttp.ClientSession
    num_chunks: int
    timeout_seconds: float = 120.0

    async def ask(self, place: Place, kind: Kind) -> Answer:
        """Raises BenchError for everything but the whole answer."""
        return (await self._exchange(place, kind))[0]

    async def ask_and_read(self, place: Place, kind: Kind) -> str:
        """As `ask`, with the answer read as a client would. Returns the gateway's id of the request, if it has one."""
        _, body, request_id = await self._exchange(place, kind)
        text = stream_text(body) if kind is Kind.STREAM else plain_text(body)
        if text != WORD.decode() * self.num_chunks:
            raise BenchError(f"{place.name}, {kind}: the answer's text is {text[:MAX_SHOWN]!r}")
        return request_id

    async def _exchange(self, place: Place, kind: Kind) -> tuple[Answer, bytes, str]:
        started_at = time.perf_counter()
        headers = {**place.headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self.timeout_seconds),
                self.session.post(place.url, data=BODIES[kind], headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    refusal = refusal_message(await response.content.read(4096))
                    raise BenchError(f"{place.name}, {kind}: HTTP {response.status}: {refusal[:MAX_SHOWN]}")
                first, body = await _read(response, FIRST[kind])
        except TimeoutError:
            raise BenchError(f"{place.name}, {kind}: no whole answer within {self.timeout_seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise BenchError(f"{place.name}, {kind}: no whole answer from {place.url}: {reason_of(error)}") from None
        ended_at = time.perf_counter()
        if first is None or not is_whole(body, kind, self.num_chunks):
            raise BenchError(f"{place.name}, {kind}: not the whole answer: {body[-MAX_SHOWN:]!r}")
        answer = Answer(first - started_at, ended_at - started_at)
        return answer, body, response.headers.get("X-Request-Id", "")


async def _read(response: aiohttp.ClientResponse, sign: bytes) -> tuple[float | None, bytes]:
    """When the sign had come, and everything."""
    body, first = bytearray(), None
    async for chunk in response.content.iter_any():
        body += chunk
        if first is None and sign in body:
            first = time.perf_counter()
    return first, bytes(body)


def is_whole(body: bytes, kind: Kind, num_chunks: int) -> bool:
    """Every word once, and the end that belongs to the kind: of a plain answer, that it is JSON."""
    if body.count(WORD) != num_chunks:
        return False
    if kind is Kind.STREAM:
        return body.rstrip().endswith(END)
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return True


def plain_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"an answer that can't be read: {error}") from None


def stream_text(body: bytes) -> str:
    reader, parser = AnswerReader(), SseParser()
    for event in parser.feed(body):
        reader.take(event, 0.0)
    if reader.error is not None:
        raise BenchError(f"error event: {reader.error}")
    if not reader.done or reader.finish_reason != "stop":
        raise BenchError(f"the stream ended early ([DONE] {reader.done}, finish_reason {reader.finish_reason})")
    return reader.text


async def set_gap(session: aiohttp.ClientSession, upstream_url: str, gap_seconds: float) -> int:
    """Tell the upstream its gap between chunks; returns how many answers were open at once since it was told last."""
    try:
        async with session.post(
            f"{upstream_url}/control", json={"gap_seconds": gap_seconds}, timeout=CONTROL_TIMEOUT
        ) as response:
            return int((await response.json())["max_open"])
    except (aiohttp.ClientError, TimeoutError, KeyError) as error:
        raise BenchError(f"the scripted upstream at {upstream_url}: {reason_of(error)}") from None
