"""Answers of an upstream that speaks events, rendered into a dialect and timed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import assert_never

import msgspec

from gateway.core.errors import UpstreamGone
from gateway.core.types import (
    ChatRequest,
    ChoiceAnswer,
    ChoiceFinished,
    Finished,
    FinishReason,
    Started,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.service.call import Renderer
from gateway.service.call_reader import CallReader
from gateway.service.exchange import Exchange

DONE_FRAME = b"data: [DONE]\n\n"
UNFINISHED = "The engine ended the answer without finishing it. Try again."


async def stream_events(
    exchange: Exchange, request: ChatRequest, events: AsyncGenerator[StreamEvent, None], renderer: Renderer
) -> AsyncGenerator[bytes, None]:
    """Frames of the answer. The first comes with the first text, so that until then an error is a plain HTTP error."""
    frames = _Frames(request, renderer)
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    exchange.note(event.notices)
                case TextDelta():
                    exchange.clock.tokens(event.num_tokens, has_text=bool(event.text), index=event.index)
                    if frame := frames.delta(event):
                        yield frame
                case ChoiceFinished(index, reason):
                    yield frames.end(index, _complete(reason))
                case Finished():
                    frame = frames.end(event.index, _accept(exchange, event))
                    yield frame + renderer.finish(event.usage) + timing_comment(exchange) + DONE_FRAME
                    return
                case _:
                    assert_never(event)
    raise UpstreamGone(UNFINISHED)


async def collect_events(
    exchange: Exchange, request: ChatRequest, events: AsyncGenerator[StreamEvent, None], renderer: Renderer
) -> bytes:
    """The answer as one object."""
    choices = _Choices(request)
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    exchange.note(event.notices)
                case TextDelta():
                    exchange.clock.tokens(event.num_tokens, has_text=bool(event.text), index=event.index)
                    choices.take(event)
                case ChoiceFinished(index, reason):
                    choices.end(index, _complete(reason))
                case Finished():
                    choices.end(event.index, _accept(exchange, event))
                    return renderer.whole(choices.answers(), event.usage)
                case _:
                    assert_never(event)
    raise UpstreamGone(UNFINISHED)


class _Calls:
    """The readers of an answer that consists of forced calls; none for any other answer."""

    def __init__(self, request: ChatRequest) -> None:
        self._request_id = request.request_id
        self.forced = request.sampling.grammar is not None and request.sampling.grammar.kind == "tool_calls"
        self._readers: dict[int, CallReader] = {}

    def read(self, delta: TextDelta) -> list[ToolCallDelta]:
        if delta.index not in self._readers:
            self._readers[delta.index] = CallReader(self._request_id, delta.index)
        return self._readers[delta.index].push(delta.text)

    def reason(self, reason: FinishReason) -> FinishReason:
        """A forced answer that stopped is complete calls."""
        return FinishReason.TOOL_CALLS if self.forced and reason is FinishReason.STOP else reason


class _Frames:
    """A stream's choices: each is opened with its first frame."""

    def __init__(self, request: ChatRequest, renderer: Renderer) -> None:
        self._renderer = renderer
        self._calls = _Calls(request)
        self._opened: set[int] = set()

    def delta(self, delta: TextDelta) -> bytes:
        """Logprobs are told with the token that they are of, even while its text is held back."""
        if self._calls.forced:
            frames = b"".join(map(self._renderer.delta, self._calls.read(delta)))
            if delta.logprobs:
                frames += self._renderer.delta(TextDelta("", 0, delta.index, delta.logprobs))
        elif delta.text or delta.logprobs:
            frames = self._renderer.delta(delta)
        else:
            return b""
        return self._open(delta.index) + frames if frames else b""

    def end(self, index: int, reason: FinishReason) -> bytes:
        return self._open(index) + self._renderer.end(index, self._calls.reason(reason))

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._renderer.start(index)


class _Choices:
    """The choices of an answer in one piece."""

    def __init__(self, request: ChatRequest) -> None:
        self._calls = _Calls(request)
        self._answers = [ChoiceAnswer(index) for index in range(request.sampling.n)]
        self._texts: list[list[str]] = [[] for _ in self._answers]

    def take(self, delta: TextDelta) -> None:
        answer = self._answers[delta.index]
        if delta.logprobs is not None:
            answer.logprobs = [*(answer.logprobs or ()), *delta.logprobs]
        if not self._calls.forced:
            self._texts[delta.index].append(delta.text)
            return
        for part in self._calls.read(delta):
            if part.name:
                answer.calls.append(ToolCall(part.call_id, part.name))
            answer.calls[-1].arguments += part.arguments

    def end(self, index: int, reason: FinishReason) -> None:
        self._answers[index].reason = self._calls.reason(reason)
        self._answers[index].text = "".join(self._texts[index])

    def answers(self) -> list[ChoiceAnswer]:
        return self._answers


def _complete(reason: FinishReason) -> FinishReason:
    """An aborted generation never looks like a finished one."""
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise UpstreamGone(f"The engine gave up on the answer ({reason.value}). Try again.")
    return reason


def _accept(exchange: Exchange, event: Finished) -> FinishReason:
    exchange.usage, exchange.timings = event.usage, event.timings
    exchange.finish(_complete(event.reason), event.usage, event.timings)
    return event.reason


def timing_comment(exchange: Exchange) -> bytes:
    """A line that every SSE parser skips; the same is at GET /v1/requests/{id}."""
    facts = {"request_id": exchange.call.request_id, "cache_mode": exchange.served_mode}
    return b": kvgate " + msgspec.json.encode(facts | exchange.timing_facts()) + b"\n\n"
