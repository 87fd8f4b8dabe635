"""Reads an answer's text while it is written: reasoning, text and calls, told apart. Pure; knows no wire format.

What can be in a text is said by the request and by two words of the engine: `tool_format`, how its model marks calls
(`call_finder.SYNTAXES`), and `reasoning_format`, how it marks reasoning (`reasoning_reader.MARKS`); "" is nothing.
"""

from __future__ import annotations

from typing import Protocol

from typing_extensions import override

from backends.protocol.messages import ChatPrompt
from gateway.core.types import ChatRequest, Delta, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta
from gateway.service.call_finder import SYNTAXES, CallFinder, CallSyntax
from gateway.service.call_json import FoundCall
from gateway.service.call_reader import CallReader, call_id
from gateway.service.reasoning_reader import MARKS, ReasoningReader


class OutputReader(Protocol):
    """One request's answer, of one or several choices. Joined deltas don't depend on how the text was cut.

    Logprobs are told with the delta that brought them, in a `TextDelta` without text while that is held back.
    """

    def push(self, delta: TextDelta) -> list[Delta]:
        """What is certain by now; often nothing."""

    def finish(self, index: int, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        """The rest of a choice, and why it really ended: a stop behind a complete call is `tool_calls`."""


def make_output_reader(request: ChatRequest, *, tool_format: str, reasoning_format: str) -> OutputReader:
    prompt, grammar = request.prompt, request.sampling.grammar
    if grammar is not None and grammar.kind == "tool_calls":
        return ForcedReader(request.request_id)
    if grammar is not None or not isinstance(prompt, ChatPrompt):
        return PlainReader()
    syntax = SYNTAXES.get(tool_format) if prompt.tools else None
    marks = MARKS.get(reasoning_format)
    if syntax is None and marks is None:
        return PlainReader()
    return MarkupReader(request.request_id, syntax, tool_names(prompt), marks)


def tool_names(prompt: ChatPrompt) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in prompt.tools or ())


class PlainReader(OutputReader):
    """Text is text."""

    @override
    def push(self, delta: TextDelta) -> list[Delta]:
        return [delta] if delta.text or delta.logprobs else []

    @override
    def finish(self, index: int, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        return [], reason


class ForcedReader(OutputReader):
    """The answer is calls, as their grammar writes them; arguments are told while they are written."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._choices: dict[int, CallReader] = {}

    @override
    def push(self, delta: TextDelta) -> list[Delta]:
        if delta.index not in self._choices:
            self._choices[delta.index] = CallReader(self._request_id, delta.index)
        return [*self._choices[delta.index].push(delta.text), *_bare_logprobs(delta)]

    @override
    def finish(self, index: int, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        reader = self._choices.get(index)
        return [], _reason(reason, has_call=reader is not None and reader.num_complete > 0)


class MarkupReader(OutputReader):
    """Reasoning and calls are marked in the text."""

    def __init__(
        self, request_id: str, syntax: CallSyntax | None, names: frozenset[str], marks: tuple[str, str] | None
    ) -> None:
        self._request_id = request_id
        self._syntax = syntax
        self._names = names
        self._marks = marks
        self._choices: dict[int, _Choice] = {}

    @override
    def push(self, delta: TextDelta) -> list[Delta]:
        return self._choice(delta.index).push(delta)

    @override
    def finish(self, index: int, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        choice = self._choice(index)
        return choice.finish(), _reason(reason, has_call=choice.num_calls > 0)

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            finder = CallFinder(self._syntax, self._names) if self._syntax is not None else None
            reasoning = ReasoningReader(*self._marks) if self._marks is not None else None
            self._choices[index] = _Choice(self._request_id, index, finder, reasoning)
        return self._choices[index]


class _Choice:
    def __init__(
        self, request_id: str, index: int, finder: CallFinder | None, reasoning: ReasoningReader | None
    ) -> None:
        self._request_id = request_id
        self._index = index
        self._finder = finder
        self._reasoning = reasoning
        self._num_tokens = 0  # of text that is held back
        self.num_calls = 0

    def push(self, delta: TextDelta) -> list[Delta]:
        self._num_tokens += delta.num_tokens
        thought, text = self._reasoning.push(delta.text) if self._reasoning is not None else ("", delta.text)
        deltas = self._thought(thought)
        deltas += self._parts(self._finder.push(text) if self._finder is not None else [text])
        return _with_logprobs(deltas, delta)

    def finish(self) -> list[Delta]:
        thought, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        deltas = self._thought(thought)
        if self._finder is None:
            return deltas + self._parts([text])
        return deltas + self._parts([*self._finder.push(text), *self._finder.finish()])

    def _thought(self, text: str) -> list[Delta]:
        return [ReasoningDelta(text, self._take_num_tokens(), self._index)] if text else []

    def _parts(self, parts: list[str] | list[str | FoundCall]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if isinstance(part, FoundCall):
                deltas += self._call(part)
            elif part:
                deltas.append(TextDelta(part, self._take_num_tokens(), self._index))
        return deltas

    def _call(self, call: FoundCall) -> list[Delta]:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        identity = call_id(self._request_id, self._index, number)
        self._take_num_tokens()
        return [
            ToolCallDelta(self._index, number, identity, call.name),
            ToolCallDelta(self._index, number, identity, "", call.arguments),
        ]

    def _take_num_tokens(self) -> int:
        number, self._num_tokens = self._num_tokens, 0
        return number


def _with_logprobs(deltas: list[Delta], source: TextDelta) -> list[Delta]:
    """On the text that the source's became; it is told first what the tokens were."""
    if not source.logprobs:
        return deltas
    if len(deltas) == 1 and isinstance(deltas[0], TextDelta):
        return [TextDelta(deltas[0].text, deltas[0].num_tokens, source.index, source.logprobs)]
    return [*deltas, *_bare_logprobs(source)]


def _bare_logprobs(source: TextDelta) -> list[Delta]:
    return [TextDelta("", 0, source.index, source.logprobs)] if source.logprobs else []


def _reason(reason: FinishReason, *, has_call: bool) -> FinishReason:
    return FinishReason.TOOL_CALLS if has_call and reason is FinishReason.STOP else reason
