"""One request, sent and timed. The clock is given; nothing here decides which request comes when.

TTFT counts from the moment before the request is sent to the first network chunk that completes an event with text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from gateway.bench.answer import AnswerReader
from gateway.bench.client import GatewayClient
from gateway.bench.failures import reason_of
from gateway.bench.options import WrongMode
from gateway.bench.rows import Outcome, RequestRow
from gateway.bench.sse import SseParser
from gateway.bench.workload import PlannedRequest
from gateway.core.types import CacheMode

Clock = Callable[[], float]  # seconds of one monotonic clock


@dataclass(frozen=True, slots=True)
class Measurement:
    """What every request of a pass has in common."""

    client: GatewayClient
    mode: CacheMode
    clock: Clock
    timeout_seconds: float
    output_tokens: int
    pass_started_at: float = 0.0


@dataclass(slots=True)
class Exchange:
    """What is known of one request so far; a failure at any point leaves the rest as it is."""

    reader: AnswerReader
    outcome: Outcome = "ok"
    error: str = ""
    http_status: int | None = None
    request_id: str = ""

    def fail(self, outcome: Outcome, error: str) -> None:
        self.outcome, self.error = outcome, error


async def measure(measurement: Measurement, planned: PlannedRequest, *, intended_at: float) -> RequestRow:
    """Send one request and read its answer to the end. Raises only `WrongMode`; every other failure is in the row."""
    exchange = Exchange(AnswerReader())
    sent_at = measurement.clock()
    try:
        async with asyncio.timeout(measurement.timeout_seconds):
            await _exchange(measurement, planned, exchange)
    except TimeoutError:
        exchange.fail("timeout", f"no whole answer within {measurement.timeout_seconds:g} s")
    except aiohttp.ClientError as error:
        exchange.fail("error", f"no whole answer: {reason_of(error)}")
    return _row(measurement, planned, exchange, intended_at=intended_at, sent_at=sent_at)


async def _exchange(measurement: Measurement, planned: PlannedRequest, exchange: Exchange) -> None:
    async with measurement.client.completion(planned.body, measurement.mode) as response:
        exchange.http_status = response.status
        exchange.request_id = response.headers.get("X-Request-Id", "")
        if response.status != 200:
            exchange.fail("error", await measurement.client.refusal(response))
            return
        _check_mode(measurement.mode, response)
        if response.content_type != "text/event-stream":
            exchange.fail("error", f"the answer is {response.content_type}, not a stream")
            return
        await _read(response, exchange.reader, measurement.clock)
    _judge(exchange, measurement)


def _check_mode(mode: CacheMode, response: aiohttp.ClientResponse) -> None:
    served = response.headers.get("X-Cache-Mode")
    if served == mode.value:
        return
    reason = response.headers.get("X-Cache-Mode-Reason", "no reason given")
    raise WrongMode(
        f"asked for {mode.value}, but the answer's X-Cache-Mode is {served or 'missing'} ({reason}). "
        "Nothing is compared: the figures would belong to another mode than they say."
    )


async def _read(response: aiohttp.ClientResponse, reader: AnswerReader, clock: Clock) -> None:
    parser = SseParser()
    async for (
        chunk
    ) in response.content.iter_any():  # by line a long one would fail; the response is closed by its owner
        at = clock()
        for event in parser.feed(chunk):
            reader.take(event, at)


def _judge(exchange: Exchange, measurement: Measurement) -> None:
    """Whether a whole stream is the answer that was asked for."""
    reader = exchange.reader
    num_tokens = reader.usage.completion_tokens if reader.usage else None
    if reader.error is not None:
        exchange.fail("error", measurement.client.without_key(f"error event: {reader.error}"))
    elif reader.finish_reason == "abort":
        exchange.fail("aborted", "finish_reason abort")
    elif not reader.done or reader.finish_reason not in {"stop", "length"}:
        exchange.fail("error", f"the stream ended early (finish_reason {reader.finish_reason}, [DONE] {reader.done})")
    elif num_tokens is None:
        exchange.fail("error", "the stream carried no usage, so its tokens can't be counted")
    elif num_tokens != measurement.output_tokens:
        asked = measurement.output_tokens
        exchange.fail("error", f"{num_tokens} output tokens instead of {asked}: ignore_eos or max_tokens had no effect")


def _row(
    measurement: Measurement, planned: PlannedRequest, exchange: Exchange, *, intended_at: float, sent_at: float
) -> RequestRow:
    reader, start, ended_at = exchange.reader, measurement.pass_started_at, measurement.clock()
    usage = reader.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
    return RequestRow(
        mode=measurement.mode,
        round_index=planned.round_index,
        index=planned.index,
        outcome=exchange.outcome,
        error=exchange.error,
        http_status=exchange.http_status,
        request_id=exchange.request_id,
        intended_at_seconds=intended_at - start,
        sent_at_seconds=sent_at - start,
        ended_at_seconds=ended_at - start,
        ttft_seconds=None if reader.first_at is None else reader.first_at - sent_at,
        tpot_seconds=reader.tpot_seconds,
        end_to_end_seconds=ended_at - sent_at,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        cached_tokens=cached,
        num_text_chunks=reader.num_text_chunks,
        finish_reason=reader.finish_reason,
        text=reader.text,
    )
