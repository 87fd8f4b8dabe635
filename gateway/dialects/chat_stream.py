"""Answers of an OpenAI-compatible chat server, read into events: streamed or in one piece. Pure, no I/O.

Lenient where servers differ, strict where an answer would be falsified: an error, a frame that can't be read or an end
without a finish reason is raised, never rounded up to a good answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from backends.protocol.messages import Timings, Usage
from gateway.core.errors import CUT, UpstreamError, UpstreamGone
from gateway.core.sse_scan import DONE, Frame
from gateway.core.types import ChoiceFinished, Delta, Finished, FinishReason, ReasoningDelta, StreamEvent, TextDelta
from gateway.dialects.chat_calls import CallOrder
from gateway.dialects.sniff import error_facts, read_usage

_UNREADABLE = "The upstream's answer can't be read: a part of it is not valid JSON of the chat completions API."
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_REASONS = {
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


@dataclass(slots=True)
class _Choice:
    calls: CallOrder
    reason: FinishReason | None = None


class ChatDecoder:
    """One answer. Events come out as `StreamEvent`s without `Started`, which only the caller can date."""

    def __init__(self, request_id: str) -> None:
        self.usage: Usage | None = None
        self._request_id = request_id
        self._choices: dict[int, _Choice] = {}
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether every choice has said why it ended: what breaks after that costs nothing."""
        return bool(self._choices) and all(choice.reason is not None for choice in self._choices.values())

    @property
    def num_choices(self) -> int:
        """That have begun."""
        return len(self._choices)

    @property
    def ended(self) -> bool:
        """After `[DONE]`: nothing more counts."""
        return self._ended

    def frame(self, frame: Frame) -> list[StreamEvent]:
        """Raises UpstreamError for an error inside the stream, UpstreamGone for what can't be read."""
        if frame.data is None or not frame.data.strip():
            return []
        if frame.data.strip() == DONE:
            self._ended = True
            return []
        chunk = _read(frame.data)
        if frame.event == "error":
            raise upstream_error(frame.data)
        return self._take(chunk, frame.data, "delta")

    def whole(self, body: bytes) -> list[StreamEvent]:
        """All events of an answer that is one JSON object."""
        return [*self._take(_read(body), body, "message"), *self.finish()]

    def finish(self) -> list[StreamEvent]:
        """The end of every choice. Raises UpstreamGone if one has not said that it is complete."""
        if not self.complete:
            raise UpstreamGone(CUT)
        events: list[StreamEvent] = []
        last = max(self._choices)
        for index, choice in sorted(self._choices.items()):
            events += choice.calls.finish()
            reason = _reason(choice)
            if index == last:
                usage = self.usage or Usage(prompt_tokens=0, completion_tokens=0)
                events.append(Finished(reason, usage, Timings(), index=index))
            else:
                events.append(ChoiceFinished(index, reason))
        return events

    def _take(self, chunk: dict[str, Any], data: bytes, key: str) -> list[StreamEvent]:
        if chunk.get("error"):
            raise upstream_error(data)
        usage = chunk.get("usage")
        self.usage = (read_usage(usage) if isinstance(usage, dict) else None) or self.usage
        choices = chunk.get("choices")
        events: list[StreamEvent] = []
        for entry in choices if isinstance(choices, list) else ():
            if isinstance(entry, dict):
                events += self._take_choice(entry, key)
        return events

    def _take_choice(self, entry: dict[str, Any], key: str) -> list[StreamEvent]:
        said = entry.get("index")
        index = said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else 0
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(CallOrder(self._request_id, index))
        message = entry.get(key)
        events: list[StreamEvent] = [*_deltas(message, index, choice.calls)] if isinstance(message, dict) else []
        reason = entry.get("finish_reason")
        if isinstance(reason, str) and reason:
            choice.reason = _REASONS.get(reason, FinishReason.STOP)
        return events


def _deltas(message: dict[str, Any], index: int, calls: CallOrder) -> list[Delta]:
    """Reasoning precedes text, text precedes calls: also where a server sends them together."""
    deltas: list[Delta] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content")
    if isinstance(content, list):
        reasoning = reasoning or "".join(map(_thought, content))
        content = "".join(map(_part, content))
    if isinstance(reasoning, str) and reasoning:
        deltas.append(ReasoningDelta(reasoning, index=index))
    for text in (content, message.get("refusal")):
        if isinstance(text, str) and text:
            deltas.append(TextDelta(text, 0, index))
    pieces = message.get("tool_calls")
    for piece in pieces if isinstance(pieces, list) else ():
        deltas += calls.push(piece)
    if isinstance(message.get("function_call"), dict):  # the older API's only call
        deltas += calls.push({"index": 0, "function": message["function_call"]})
    return deltas


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _thought(part: Any) -> str:
    """Some servers send reasoning as a part of the content: a string, or parts again."""
    inner = part.get("thinking") if isinstance(part, dict) else None
    return "".join(map(_part, inner)) if isinstance(inner, list) else inner if isinstance(inner, str) else ""


def _reason(choice: _Choice) -> FinishReason:
    """Calls and the reason agree: clients loop or hang where they don't."""
    assert choice.reason is not None
    if choice.reason is FinishReason.STOP and choice.calls.seen:
        return FinishReason.TOOL_CALLS
    return choice.reason


def _read(data: bytes) -> dict[str, Any]:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UpstreamGone(_UNREADABLE) from None


def upstream_error(data: bytes, status: int | None = None, retry_after: str | None = None) -> UpstreamError:
    """The upstream's error, in words that any dialect can say."""
    facts = error_facts(data)
    error = UpstreamError(
        facts.message,
        status=status or facts.status or 502,
        retry_after=retry_after,
        is_final=status is None,  # told within an answer
    )
    error.code, error.param = facts.code or error.code, facts.param
    return error
