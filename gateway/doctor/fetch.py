"""Sends one request and writes down what came when. The only part of the doctor that opens connections."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.core.sse_scan import Frame, SseScanner
from gateway.doctor.answer import Answer, Event

MAX_BODY_BYTES = 4 * 1024**2
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ask:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None


@dataclass
class _Log:
    """Times of what arrives."""

    started_at: float
    last_at: float
    first_at: float | None = None
    longest_silence: float = 0.0
    num_comments: int = 0
    events: list[Event] = field(default_factory=list)

    def mark(self) -> float:
        now = time.monotonic()
        self.longest_silence = max(self.longest_silence, now - self.last_at)
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        return now - self.started_at

    def take(self, frames: list[Frame], at: float) -> None:
        for frame in frames:
            if frame.data is None:
                self.num_comments += is_heartbeat(frame.raw)
            else:
                self.events.append(Event(at, frame.event, frame.data.decode("utf-8", "replace")))


def is_heartbeat(comment: bytes) -> bool:
    """The gateway's last comment holds the request's timings and is none."""
    text = comment.strip()
    return text.startswith(b":") and not text.startswith(b": kvgate")


async def fetch(session: aiohttp.ClientSession, ask: Ask, timeout_seconds: float) -> Answer:
    """Never raises for what the other side does: the answer says it."""
    now = time.monotonic()
    log = _Log(now, now)
    status, headers, body, failure = 0, {}, b"", ""
    try:
        async with asyncio.timeout(timeout_seconds), _sent(session, ask) as response:
            status = response.status
            headers = {name.lower(): value for name, value in response.headers.items()}
            body = await _read(response, log)
    except TimeoutError:
        failure = f"no end of the answer within {timeout_seconds:g} s"
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno
        failure = f"no connection: {os.strerror(number) if number else error.os_error}"
    except (aiohttp.ClientError, ValueError) as error:
        failure = f"the answer was cut off: {type(error).__name__}"
    ended_at = time.monotonic()
    return Answer(
        status=status,
        headers=headers,
        body=body,
        events=tuple(log.events),
        num_comments=log.num_comments,
        first_byte_seconds=(log.first_at or ended_at) - log.started_at,
        longest_silence_seconds=max(log.longest_silence, ended_at - log.last_at),
        total_seconds=ended_at - log.started_at,
        failure=failure,
    )


def _sent(session: aiohttp.ClientSession, ask: Ask) -> Any:
    data = None if ask.body is None else json.dumps(ask.body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", **ask.headers} if data else dict(ask.headers)
    return session.request(ask.method, ask.url, data=data, headers=headers, allow_redirects=False)


async def _read(response: aiohttp.ClientResponse, log: _Log) -> bytes:
    """The body of an answer that is no stream; a stream goes into the log."""
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        body = await response.content.read(MAX_BODY_BYTES)
        while len(body) < MAX_BODY_BYTES and (more := await response.content.read(MAX_BODY_BYTES - len(body))):
            body += more
        log.mark()
        return body
    scanner = SseScanner()
    async for chunk in response.content.iter_any():
        log.take(scanner.feed(chunk), log.mark())
    last = scanner.finish()
    log.take([last] if last else [], log.last_at - log.started_at)
    return b""
