"""One streamed answer of any OpenAI-compatible /v1/completions server, with the instant of every piece of text.

Knows no server by name. Prompts are lists of token ids, so every server computes the same tokens and none spends time
on splitting text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from gateway.bench.answer import AnswerReader
from gateway.bench.client import refusal_message
from gateway.bench.failures import reason_of
from gateway.bench.measure import Clock
from gateway.bench.process import BenchError
from gateway.bench.sse import SseParser

MAX_ERROR_BYTES = 4096


@dataclass(slots=True)
class Sample:
    """A request and its answer so far. Instants are of the client's clock."""

    sent_at: float
    text_at: list[float] = field(default_factory=list)  # of each piece that carried text
    last_at: float | None = None  # last text or the finish, whichever came later
    ended_at: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_seconds(self) -> float:
        return self.text_at[0] - self.sent_at

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first token."""
        if self.output_tokens < 2 or self.last_at is None or self.last_at <= self.text_at[0]:
            raise BenchError("the answer came in one piece, so its decode speed can't be told")
        return (self.output_tokens - 1) / (self.last_at - self.text_at[0])


@dataclass(frozen=True, slots=True)
class CompletionClient:
    """A session with one server that serves `model`."""

    session: aiohttp.ClientSession
    url: str
    model: str
    clock: Clock
    timeout_seconds: float = 600.0

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Sample:
        """The whole answer, checked: as many tokens as were asked. Raises BenchError."""
        sample = Sample(self.clock())
        await self.stream(prompt, max_tokens, sample)
        if sample.output_tokens != max_tokens:
            raise BenchError(f"{sample.output_tokens} output tokens instead of {max_tokens}")
        if sample.prompt_tokens != len(prompt):
            raise BenchError(f"the server counts {sample.prompt_tokens} prompt tokens of {len(prompt)} that were sent")
        return sample

    async def stream(
        self, prompt: Sequence[int], max_tokens: int, sample: Sample, on_text: Callable[[], None] | None = None
    ) -> None:
        """Fill `sample` while the answer comes. Cancelling it closes the connection, which aborts the request."""
        try:
            async with (
                asyncio.timeout(self.timeout_seconds),
                self.session.post(
                    f"{self.url}/v1/completions",
                    data=request_body(self.model, prompt, max_tokens),
                    headers={"Content-Type": "application/json"},
                ) as response,
            ):
                if response.status != 200:
                    refusal = refusal_message(await response.content.read(MAX_ERROR_BYTES))
                    raise BenchError(f"HTTP {response.status}: {refusal}")
                reader = await self._read(response, sample, on_text)
        except TimeoutError:
            raise BenchError(f"no whole answer within {self.timeout_seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise BenchError(f"no whole answer from {self.url}: {reason_of(error)}") from None
        _finish(sample, reader, self.clock())

    async def _read(
        self, response: aiohttp.ClientResponse, sample: Sample, on_text: Callable[[], None] | None
    ) -> AnswerReader:
        parser, reader = SseParser(), AnswerReader()
        async for chunk in response.content.iter_any():
            at = self.clock()
            for event in parser.feed(chunk):
                reader.take(event, at)
            # Pieces that came in one network read arrived at one instant.
            if reader.num_text_chunks > len(sample.text_at):
                sample.text_at += [at] * (reader.num_text_chunks - len(sample.text_at))
                if on_text is not None:
                    on_text()
        return reader


def request_body(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """Greedy, and never ended early, so that every server writes the same number of tokens."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _finish(sample: Sample, reader: AnswerReader, at: float) -> None:
    if reader.error is not None:
        raise BenchError(f"error event: {reader.error}")
    if not reader.done or reader.usage is None:
        raise BenchError(f"the stream ended early ([DONE] {reader.done}, usage {reader.usage is not None})")
    if not sample.text_at:
        raise BenchError("the answer has no text, so its first token can't be timed")
    sample.last_at, sample.ended_at = reader.last_at, at
    sample.prompt_tokens, sample.output_tokens = reader.usage.prompt_tokens, reader.usage.completion_tokens
