"""Events of one answer as OpenAI's Responses: a stream of typed events, or the response object. Pure.

The stream begins with `response.created` and ends with exactly one of `response.completed`, `response.incomplete` and
`response.failed`. There is no `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

from backends.protocol.messages import Usage
from gateway.core.types import (
    ChoiceAnswer,
    Delta,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)
from gateway.dialects.base import AnswerContext, ErrorFacts
from gateway.dialects.fields import Fields
from gateway.dialects.responses_conversation import PREFIX
from gateway.dialects.responses_custom_input import CustomInput
from gateway.dialects.responses_echo import read_echo
from gateway.dialects.responses_errors import failure
from gateway.dialects.responses_events import EventWriter, encode, opening
from gateway.dialects.responses_output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    call_item,
    call_prefix,
    logprob_objects,
    message_item,
    reasoning_item,
    text_part,
)
from gateway.dialects.responses_request import ResponsesContext
from gateway.dialects.responses_tools import ToolTable

KEEP_ALIVE = b": keep-alive\n\n"


class Renderer:
    """One answer. Without the request's context, which a stream that passes through doesn't have, only its failure."""

    def __init__(self, context: AnswerContext) -> None:
        asked = context.chat_context
        self._foreign = not isinstance(asked, ResponsesContext)
        self._asked: ResponsesContext = _nothing_asked() if self._foreign else asked
        self._request_id, self._id = context.request_id, PREFIX + context.request_id
        fixed = {"id": self._id, "object": "response", "created_at": context.created, "model": context.model}
        self._fixed = fixed | self._asked.echo
        self._encoded = encode(self._fixed)[:-1]
        self._writer = EventWriter()
        self._created, self._ended = self._foreign, False
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._open: OpenItem | None = None
        self._call = -1  # number of the call that is open
        self._reason = FinishReason.STOP
        self._num_reasoning_tokens = 0

    # -------------------------------------------------------------------------------------------------------- a stream

    def begin(self, started: Started | None) -> bytes:
        if self._created:
            return b""
        self._created = True
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def heartbeat(self) -> bytes:
        """A data event: clients of this API take a stream of nothing but comments for a silent one.

        A stream that passes through has its own response, of which nothing can be said here.
        """
        if self._foreign:
            return KEEP_ALIVE
        return self._lifecycle("response.in_progress") if self._created else self.begin(None)

    def start(self, index: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if delta.index != 0:  # this API has one answer
            return b""
        match delta:
            case TextDelta():
                return self._text(delta)
            case ReasoningDelta():
                return self._reasoning(delta)
            case ToolCallDelta():
                return self._call_delta(delta)
            case _:
                assert_never(delta)

    def end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> bytes:
        """An answer without anything in it is an empty message: clients take no item for no answer."""
        if index != 0:
            return b""
        self._reason = reason
        frames = b"" if self._open is not None or self._output else self._turn_to_message()
        return frames + self._close(complete=reason is not FinishReason.LENGTH)

    def finish(self, usage: Usage) -> bytes:
        self._ended = True
        said = self._final(self._reason, usage, self._num_reasoning_tokens)
        return self._lifecycle(f"response.{said['status']}", **said)

    def error(self, facts: ErrorFacts) -> bytes:
        """For the SDKs an `error`, which they raise; for Codex a `response.failed`, by whose code it acts."""
        error = failure(facts)
        frames = self.begin(None)
        frames += self._writer.event("error", **error, param=facts.param, error={**error, "type": facts.kind})
        output = [*self._output, *([self._open.item(INCOMPLETE)] if self._open is not None else [])]
        return frames + self._lifecycle("response.failed", status="failed", error=error, output=output)

    def _text(self, delta: TextDelta) -> bytes:
        if isinstance(self._open, OpenMessage):
            return self._open.delta(delta) if delta.text or delta.logprobs else b""
        if not delta.text:
            return b""
        frames = self._turn_to_message()
        assert isinstance(self._open, OpenMessage)
        return frames + self._open.delta(delta)

    def _turn_to_message(self) -> bytes:
        return self._turn_to(OpenMessage(self._writer, self._item_id("msg"), self._next_index()))

    def _reasoning(self, delta: ReasoningDelta) -> bytes:
        self._num_reasoning_tokens += delta.num_tokens
        if not delta.text:
            return b""
        frames = b""
        if not isinstance(self._open, OpenReasoning):
            frames = self._turn_to(OpenReasoning(self._writer, self._item_id("rs"), self._next_index()))
        assert isinstance(self._open, OpenReasoning)
        return frames + self._open.delta(delta.text)

    def _call_delta(self, delta: ToolCallDelta) -> bytes:
        frames = b""
        if delta.call != self._call:
            self._call = delta.call
            tool = self._asked.table.restore(delta.name)
            opened = OpenCustomCall if tool.custom else OpenCall
            item_id = self._item_id(call_prefix(tool))
            frames = self._turn_to(opened(self._writer, item_id, self._next_index(), delta.call_id, tool))
        assert isinstance(self._open, OpenCall | OpenCustomCall)
        return frames + self._open.delta(delta.arguments)

    def _turn_to(self, item: OpenItem) -> bytes:
        frames = self._close(complete=True)
        self._open = item
        return frames + item.open()

    def _close(self, *, complete: bool) -> bytes:
        if self._open is None:
            return b""
        frames = self._open.close(complete=complete)
        self._output.append(self._open.item(COMPLETED if complete else INCOMPLETE))
        self._open = None
        return frames

    def _next_index(self) -> int:
        return len(self._output) + (self._open is not None)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{self._next_index()}"

    def _lifecycle(self, name: str, **said: Any) -> bytes:
        state = {"status": IN_PROGRESS, "error": None, "incomplete_details": None, "output": [], "usage": None, **said}
        response = self._encoded + b"," + encode(state)[1:]
        return self._writer.spliced(opening(name), b',"response":' + response)

    # ------------------------------------------------------------------------------------------------------- one piece

    def whole(self, choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        choice = choices[0]
        complete = choice.reason is not FinishReason.LENGTH
        if choice.reasoning:
            last = not choice.text and not choice.calls
            status = COMPLETED if complete or not last else INCOMPLETE
            self._output.append(reasoning_item(self._item_id("rs"), choice.reasoning, status))
        if choice.text or not (choice.reasoning or choice.calls):
            status = COMPLETED if complete or choice.calls else INCOMPLETE
            part = text_part(choice.text, logprob_objects(choice.logprobs or ()))
            self._output.append(message_item(self._item_id("msg"), [part], status))
        for call in choice.calls:
            self._output.append(self._whole_call(call, complete=complete or call is not choice.calls[-1]))
        self._ended = True
        return encode(self._fixed | self._final(choice.reason, usage, choice.num_reasoning_tokens))

    def _whole_call(self, call: ToolCall, *, complete: bool) -> dict[str, Any]:
        tool = self._asked.table.restore(call.name)
        value = call.arguments
        if tool.custom:
            read = CustomInput()
            given = read.push(value)
            value = read.finish()[1] if complete else given
        elif complete and not value.strip():
            value = "{}"
        status = COMPLETED if complete else INCOMPLETE
        return call_item(self._item_id(call_prefix(tool)), call.call_id, tool, value, status)

    # ------------------------------------------------------------------------------------------------------------ both

    def conversation(self) -> tuple[str, Any] | None:
        """Nothing of an answer that broke off, and nothing if the client didn't want it stored."""
        if not self._ended or not self._asked.store:
            return None
        return self._id, [*self._asked.items, *self._output]

    def _final(self, reason: FinishReason, usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
        cut = reason is FinishReason.LENGTH
        return {
            "status": INCOMPLETE if cut else COMPLETED,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage(usage, num_reasoning_tokens),
        }


def _nothing_asked() -> ResponsesContext:
    table = ToolTable()
    return ResponsesContext(table, read_echo(Fields({}), table, {"format": {"type": "text"}}), [], store=False)


def _usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
