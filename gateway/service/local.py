"""Events of an answer, from whoever made them, rendered into a dialect and timed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import assert_never

import msgspec

from gateway.core.errors import UpstreamGone
from gateway.core.types import (
    ChoiceAnswer,
    ChoiceFinished,
    Delta,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    StreamEvent,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.dialects.base import Renderer
from gateway.service.exchange import Exchange
from gateway.service.exchange_facts import timing_facts
from gateway.service.output_reader import OutputReader

UNFINISHED = "The engine ended the answer without finishing it. Try again."


async def stream_events(
    exchange: Exchange, events: AsyncGenerator[StreamEvent, None], renderer: Renderer, reader: OutputReader
) -> AsyncGenerator[bytes, None]:
    """Frames of the answer. The first comes with the first text, so that until then an error is a plain HTTP error."""
    frames = _Frames(renderer)
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    _start(exchange, event)
                    frames.started = event
                case TextDelta():
                    _tick(exchange, event)
                    if frame := frames.deltas(reader.push(event)):
                        yield frame
                case ReasoningDelta() | ToolCallDelta():
                    exchange.clock.text_chunk()
                    yield frames.deltas([event])
                case ChoiceFinished(index, reason, stop_reason):
                    yield frames.end(index, *reader.finish(index, _complete(reason)), stop_reason)
                case Finished():
                    _accept(exchange, event)
                    last = frames.end(event.index, *reader.finish(event.index, event.reason), event.stop_reason)
                    closing = renderer.finish(event.usage)
                    exchange.remember()
                    told = timing_comment(exchange) if exchange.call.dialect.takes_comments else b""
                    yield last + told + closing
                    return
                case _:
                    assert_never(event)
    raise UpstreamGone(UNFINISHED)


async def collect_events(
    exchange: Exchange, events: AsyncGenerator[StreamEvent, None], renderer: Renderer, reader: OutputReader
) -> bytes:
    """The answer as one object."""
    choices = _Choices()
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    _start(exchange, event)
                case TextDelta():
                    _tick(exchange, event)
                    choices.take(reader.push(event))
                case ReasoningDelta() | ToolCallDelta():
                    choices.take([event])
                case ChoiceFinished(index, reason, stop_reason):
                    choices.end(index, *reader.finish(index, _complete(reason)), stop_reason)
                case Finished():
                    _accept(exchange, event)
                    choices.end(event.index, *reader.finish(event.index, event.reason), event.stop_reason)
                    body = renderer.whole(choices.answers(), event.usage)
                    exchange.remember()
                    return body
                case _:
                    assert_never(event)
    raise UpstreamGone(UNFINISHED)


class _Frames:
    """A stream's choices: each is opened with its first frame, the stream itself with the first of all."""

    def __init__(self, renderer: Renderer) -> None:
        self.started: Started | None = None
        self._renderer = renderer
        self._opened: set[int] = set()

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """Logprobs are told with the token that they are of, even while its text is held back."""
        return b"".join(
            self._open(delta.index) + self._renderer.delta(delta) for delta in deltas if _says_something(delta)
        )

    def end(self, index: int, rest: Iterable[Delta], reason: FinishReason, stop_reason: str | int | None) -> bytes:
        return self.deltas(rest) + self._open(index) + self._renderer.end(index, reason, stop_reason)

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        opening = b"" if self._opened else self._renderer.begin(self.started)
        self._opened.add(index)
        return opening + self._renderer.start(index)


class _Choices:
    """The choices of an answer in one piece."""

    def __init__(self) -> None:
        self._answers: dict[int, ChoiceAnswer] = {}
        self._texts: dict[int, list[str]] = {}
        self._reasonings: dict[int, list[str]] = {}
        self._arguments: dict[int, list[list[str]]] = {}  # of each call of a choice

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            answer = self._answer(delta.index)
            match delta:
                case TextDelta():
                    self._texts[delta.index].append(delta.text)
                    if delta.logprobs is not None:
                        answer.logprobs = answer.logprobs or []
                        answer.logprobs.extend(delta.logprobs)
                case ReasoningDelta():
                    self._reasonings[delta.index].append(delta.text)
                    answer.num_reasoning_tokens += delta.num_tokens
                case ToolCallDelta():
                    self._take_call(answer, delta)
                case _:
                    assert_never(delta)

    def end(self, index: int, rest: Iterable[Delta], reason: FinishReason, stop_reason: str | int | None) -> None:
        self.take(rest)
        answer = self._answer(index)
        answer.reason, answer.stop_reason = reason, stop_reason
        answer.text, answer.reasoning = "".join(self._texts[index]), "".join(self._reasonings[index])
        for call, parts in zip(answer.calls, self._arguments[index], strict=True):
            call.arguments = "".join(parts)

    def answers(self) -> list[ChoiceAnswer]:
        return [self._answers[index] for index in sorted(self._answers)]

    def _answer(self, index: int) -> ChoiceAnswer:
        if index not in self._answers:
            self._answers[index] = ChoiceAnswer(index)
            self._texts[index], self._reasonings[index], self._arguments[index] = [], [], []
        return self._answers[index]

    def _take_call(self, answer: ChoiceAnswer, delta: ToolCallDelta) -> None:
        arguments = self._arguments[delta.index]
        if delta.name:
            answer.calls.append(ToolCall(delta.call_id, delta.name))
            arguments.append([])
        arguments[-1].append(delta.arguments)


def _says_something(delta: Delta) -> bool:
    match delta:
        case TextDelta():
            return bool(delta.text or delta.logprobs)
        case ReasoningDelta():
            return bool(delta.text)
        case ToolCallDelta():
            return bool(delta.name or delta.arguments)
        case _:
            assert_never(delta)


def _start(exchange: Exchange, event: Started) -> None:
    exchange.note(event.notices)
    exchange.instance, exchange.instance_reason = event.instance, event.instance_reason
    exchange.accept()


def _tick(exchange: Exchange, event: TextDelta) -> None:
    if not exchange.translated:
        exchange.clock.tokens(event.num_tokens, has_text=bool(event.text), index=event.index)
    elif event.text:
        exchange.clock.text_chunk()


def _complete(reason: FinishReason) -> FinishReason:
    """An aborted generation never looks like a finished one."""
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise UpstreamGone(f"The engine gave up on the answer ({reason.value}). Try again.")
    return reason


def _accept(exchange: Exchange, event: Finished) -> None:
    """An upstream elsewhere tells no timings, and perhaps no usage: what isn't known stays unknown."""
    if exchange.translated:
        exchange.finish(_complete(event.reason), exchange.usage, None)
        exchange.check_prompt()
        return
    exchange.usage, exchange.timings = event.usage, event.timings
    exchange.finish(_complete(event.reason), event.usage, event.timings)


def timing_comment(exchange: Exchange) -> bytes:
    """A line that every SSE parser skips; the same is at GET /v1/requests/{id}."""
    facts = {"request_id": exchange.call.request_id, "cache_mode": exchange.served_mode}
    return b": kvgate " + msgspec.json.encode(facts | timing_facts(exchange)) + b"\n\n"
