"""Output items of OpenAI's Responses: what each looks like, and the events in which it is streamed. Pure.

An item that the token limit cut off is closed as incomplete, except for a call: it gets no `done`, since clients run
what is done, and half a command is another command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from backends.protocol.messages import TokenLogprob
from gateway.core.types import TextDelta
from gateway.dialects.responses_custom_input import CustomInput
from gateway.dialects.responses_events import EventWriter, encode, opening
from gateway.dialects.responses_tools import ToolName

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(item_id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


def reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """The reasoning itself: a summary of it would be another text, and there is none."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(item_id: str, call_id: str, tool: ToolName, value: str, status: str) -> dict[str, Any]:
    kind, key = ("custom_tool_call", "input") if tool.custom else ("function_call", "arguments")
    item = {"id": item_id, "type": kind, "status": status, "call_id": call_id, "name": tool.name, key: value}
    return item if tool.namespace is None else item | {"namespace": tool.namespace}


def call_prefix(tool: ToolName) -> str:
    return "ctc" if tool.custom else "fc"


def logprob_objects(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [_token(token) | {"top_logprobs": [_token(other) for other in token.top]} for token in logprobs]


def _token(token: TokenLogprob) -> dict[str, Any]:
    data = token.text.encode() if token.bytes is None else token.bytes
    return {"token": token.text, "logprob": token.logprob, "bytes": list(data)}


class OpenItem(Protocol):
    """An item while it is written."""

    def open(self) -> bytes: ...

    def close(self, *, complete: bool) -> bytes: ...

    def item(self, status: str) -> dict[str, Any]: ...


class OpenMessage:
    def __init__(self, writer: EventWriter, item_id: str, index: int) -> None:
        self._writer, self._id, self._index = writer, item_id, index
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._head = opening("response.output_text.delta", **self._place, logprobs=[])
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def open(self) -> bytes:
        item = message_item(self._id, [], IN_PROGRESS)
        added = self._writer.event("response.output_item.added", output_index=self._index, item=item)
        return added + self._writer.event("response.content_part.added", **self._place, part=text_part("", []))

    def delta(self, delta: TextDelta) -> bytes:
        self._text.append(delta.text)
        if not delta.logprobs:
            return self._writer.spliced(self._head, b',"delta":' + encode(delta.text))
        logprobs = logprob_objects(delta.logprobs)
        self._logprobs += logprobs
        return self._writer.event("response.output_text.delta", **self._place, delta=delta.text, logprobs=logprobs)

    def close(self, *, complete: bool) -> bytes:
        text, item = "".join(self._text), self.item(COMPLETED if complete else INCOMPLETE)
        done = self._writer.event("response.output_text.done", **self._place, text=text, logprobs=self._logprobs)
        done += self._writer.event("response.content_part.done", **self._place, part=item["content"][0])
        return done + self._writer.event("response.output_item.done", output_index=self._index, item=item)

    def item(self, status: str) -> dict[str, Any]:
        return message_item(self._id, [text_part("".join(self._text), self._logprobs)], status)


class OpenReasoning:
    def __init__(self, writer: EventWriter, item_id: str, index: int) -> None:
        self._writer, self._id, self._index = writer, item_id, index
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._head = opening("response.reasoning_text.delta", **self._place)
        self._text: list[str] = []

    def open(self) -> bytes:
        item, part = reasoning_item(self._id, None, IN_PROGRESS), {"type": "reasoning_text", "text": ""}
        added = self._writer.event("response.output_item.added", output_index=self._index, item=item)
        return added + self._writer.event("response.content_part.added", **self._place, part=part)

    def delta(self, text: str) -> bytes:
        self._text.append(text)
        return self._writer.spliced(self._head, b',"delta":' + encode(text))

    def close(self, *, complete: bool) -> bytes:
        item = self.item(COMPLETED if complete else INCOMPLETE)
        part = item["content"][0]
        done = self._writer.event("response.reasoning_text.done", **self._place, text=part["text"])
        done += self._writer.event("response.content_part.done", **self._place, part=part)
        return done + self._writer.event("response.output_item.done", output_index=self._index, item=item)

    def item(self, status: str) -> dict[str, Any]:
        return reasoning_item(self._id, "".join(self._text), status)


class OpenCall:
    """A call of a function: its arguments go out as they come."""

    def __init__(self, writer: EventWriter, item_id: str, index: int, call_id: str, tool: ToolName) -> None:
        self._writer, self._id, self._index = writer, item_id, index
        self._call_id, self._tool = call_id, tool
        self._place = {"item_id": item_id, "output_index": index}
        self._head = opening("response.function_call_arguments.delta", **self._place)
        self._value: list[str] = []

    def open(self) -> bytes:
        item = call_item(self._id, self._call_id, self._tool, "", IN_PROGRESS)
        return self._writer.event("response.output_item.added", output_index=self._index, item=item)

    def delta(self, arguments: str) -> bytes:
        self._value.append(arguments)
        return self._writer.spliced(self._head, b',"delta":' + encode(arguments)) if arguments else b""

    def close(self, *, complete: bool) -> bytes:
        if not complete:
            return b""
        item = self.item(COMPLETED)
        done = self._writer.event(
            "response.function_call_arguments.done", **self._place, name=item["name"], arguments=item["arguments"]
        )
        return done + self._writer.event("response.output_item.done", output_index=self._index, item=item)

    def item(self, status: str) -> dict[str, Any]:
        value = "".join(self._value)
        arguments = "{}" if status == COMPLETED and not value.strip() else value
        return call_item(self._id, self._call_id, self._tool, arguments, status)


class OpenCustomCall:
    """A call of a custom tool: its input is read out of the arguments of the function that stands for it."""

    def __init__(self, writer: EventWriter, item_id: str, index: int, call_id: str, tool: ToolName) -> None:
        self._writer, self._id, self._index = writer, item_id, index
        self._call_id, self._tool = call_id, tool
        self._place = {"item_id": item_id, "output_index": index}
        self._input = CustomInput()
        self._value: list[str] = []

    def open(self) -> bytes:
        item = call_item(self._id, self._call_id, self._tool, "", IN_PROGRESS)
        return self._writer.event("response.output_item.added", output_index=self._index, item=item)

    def delta(self, arguments: str) -> bytes:
        return self._give(self._input.push(arguments))

    def _give(self, text: str) -> bytes:
        if not text:
            return b""
        self._value.append(text)
        return self._writer.event("response.custom_tool_call_input.delta", **self._place, delta=text)

    def close(self, *, complete: bool) -> bytes:
        if not complete:
            return b""
        missing, whole = self._input.finish()
        done = self._give(missing)
        done += self._writer.event("response.custom_tool_call_input.done", **self._place, input=whole)
        item = self.item(COMPLETED)
        return done + self._writer.event("response.output_item.done", output_index=self._index, item=item)

    def item(self, status: str) -> dict[str, Any]:
        return call_item(self._id, self._call_id, self._tool, "".join(self._value), status)
