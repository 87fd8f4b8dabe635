"""Events of one answer as the event stream of the Anthropic API. Pure, no I/O.

One block is open at a time, blocks are numbered as they open, and each is closed before the next: clients look blocks
up by their number, and send the whole turn again when a delta doesn't fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from backends.protocol.messages import Usage
from gateway.core.types import (
    ChoiceAnswer,
    Delta,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
)
from gateway.dialects.anthropic_answer import EMPTY_TEXT, Envelope, encode, stop_fields, usage_object
from gateway.dialects.anthropic_errors import error_object
from gateway.dialects.base import AnswerContext, ErrorFacts
from gateway.dialects.object_arguments import ArgumentsWriter

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
_SIGNATURE = {"type": "signature_delta", "signature": ""}
_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
_DELTA_OF = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def frame(event: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), encode({"type": event, **fields}))


class Blocks:
    """The content blocks of a stream: which is open, and the frames that open, fill and close them."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        self._head = b""  # of a delta of the open block, up to its text

    @property
    def num_blocks(self) -> int:
        return self._index + 1

    def begin(self, block: dict[str, Any], delta_type: str, key: str) -> bytes:
        closed = self.close()
        self._index += 1
        self._open = block["type"]
        self._head = _DELTA % (self._index, delta_type.encode(), key.encode())
        return closed + frame("content_block_start", {"index": self._index, "content_block": block})

    def fill(self, text: str) -> bytes:
        return self._head + encode(text) + b"}}\n\n" if text else b""

    def write(self, block: dict[str, Any], text: str) -> bytes:
        """Text into a block of that type: the open one, or a new one."""
        kind = block["type"]
        opened = b"" if self._open == kind else self.begin(block, *_DELTA_OF[kind])
        return opened + self.fill(text)

    def close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":  # the API ends such a block by its signature; nobody here has one to give
            signature = frame("content_block_delta", {"index": self._index, "delta": _SIGNATURE})
        self._open = None
        return signature + frame("content_block_stop", {"index": self._index})


class MessagesRenderer:
    """One answer. The API has one choice only, so that `index` says nothing here."""

    def __init__(self, context: AnswerContext) -> None:
        self._envelope = Envelope(context)
        self._blocks = Blocks()
        self._call: ArgumentsWriter | None = None
        self._held: list[TextDelta | ReasoningDelta] = []  # came in the middle of a call
        self._has_calls = False
        self._stop: dict[str, str | None] = {}

    def begin(self, started: Started | None) -> bytes:
        """What was found in the cache isn't known yet: the last usage tells the two apart."""
        usage = usage_object(Usage(prompt_tokens=started.prompt_tokens if started else 0, completion_tokens=0))
        return frame("message_start", {"message": self._envelope.message([], usage)})

    def start(self, index: int) -> bytes:
        """Blocks open with their first text, when their type is known."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            return self._tool_call(delta)
        if not delta.text:
            return b""
        if self._call is None:
            return self._text(delta)
        # Only the first one looks whether the call is complete: a long call is not read again for each of them.
        complete = not self._held and self._call.complete
        self._held.append(delta)
        return self._end_call() if complete else b""

    def _text(self, delta: TextDelta | ReasoningDelta) -> bytes:
        match delta:
            case TextDelta():
                return self._blocks.write(EMPTY_TEXT, delta.text)
            case ReasoningDelta():
                return self._blocks.write(_THINKING, delta.text)
            case _:
                assert_never(delta)

    def _tool_call(self, delta: ToolCallDelta) -> bytes:
        frames = b""
        if delta.name:
            frames = self._end_call() + self._begin_call(delta)
        if self._call is None:
            return frames  # more of a call that was complete: nothing but space can follow
        return frames + self._blocks.fill(self._call.push(delta.arguments))

    def _begin_call(self, delta: ToolCallDelta) -> bytes:
        self._call = ArgumentsWriter()
        self._has_calls = True
        block = self._envelope.tool_use(delta.call_id, delta.call, delta.name) | {"input": {}}
        return self._blocks.begin(block, "input_json_delta", "partial_json")

    def _end_call(self) -> bytes:
        """Close the call, if one is open, and tell what was held back until then."""
        if self._call is None:
            return b""
        frames = self._blocks.fill(self._call.finish()) + self._blocks.close()
        self._call = None
        held, self._held = self._held, []
        return frames + b"".join(map(self._text, held))

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes:
        frames = self._end_call() + self._blocks.close()
        if not self._blocks.num_blocks:
            frames = self._blocks.write(EMPTY_TEXT, "") + self._blocks.close()
        self._stop = stop_fields(reason, stop_reason, has_calls=self._has_calls)
        return frames

    def finish(self, usage: Usage) -> bytes:
        """Counts are totals: they take the place of those that the stream began with."""
        last = {"delta": self._stop, "usage": usage_object(usage)}
        return frame("message_delta", last) + frame("message_stop", {})

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        return self._envelope.whole(choices[0], usage)

    def conversation(self) -> None:
        """The client sends the whole conversation each time."""

    def heartbeat(self) -> bytes:
        return PING

    def error(self, facts: ErrorFacts) -> bytes:
        return frame("error", error_object(facts))
