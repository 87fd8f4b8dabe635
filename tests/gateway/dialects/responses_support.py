"""For the tests of the Responses dialect: answers are driven, and their events held to the SDK's types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import httpx2
from generated_answers import choice_of
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent

from backends.protocol.messages import Usage
from gateway.core.types import Delta, FinishReason, Started, ToolCallDelta
from gateway.dialects.base import AnswerContext
from gateway.dialects.openai_responses import DIALECT, to_chat
from gateway.dialects.responses_conversation import expand

REQUEST_ID = "ab" * 16
USAGE = Usage(prompt_tokens=30, completion_tokens=9, cached_tokens=16)
EVENT_TYPES = {
    get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(ResponseStreamEvent)[0])
}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ]},
]  # fmt: skip

CLOSED_BY = {"_text.done": "text", "_call_input.done": "input", "_call_arguments.done": "arguments"}


def make_renderer(request_id: str = REQUEST_ID, **fields: Any):
    body = {"model": "smollm2", "input": "hi", "tools": TOOLS, **fields}
    form = to_chat(expand(body, {"resp_1": []}.get))
    context = AnswerContext(request_id, 1_700_000_000, "smollm2", body=body, chat_context=form.context)
    return DIALECT.renderer(context)


def call(number: int, name: str, *arguments: str) -> list[ToolCallDelta]:
    first = ToolCallDelta(0, number, f"call_{number}", name)
    return [first, *(ToolCallDelta(0, number, f"call_{number}", "", part) for part in arguments)]


def stream(deltas: Iterable[Delta], reason: FinishReason = FinishReason.STOP, renderer: Any = None) -> bytes:
    renderer = renderer or make_renderer()
    frames = renderer.begin(Started(30, 100)) + renderer.start(0)
    frames += b"".join(renderer.delta(delta) for delta in deltas)
    return frames + renderer.end(0, reason) + renderer.finish(USAGE)


def whole(deltas: Iterable[Delta], reason: FinishReason = FinishReason.STOP, renderer: Any = None) -> dict[str, Any]:
    body = json.loads((renderer or make_renderer()).whole([choice_of(deltas, reason)], USAGE))
    Response.model_validate(body)
    return body


def read_events(frames: bytes) -> list[dict[str, Any]]:
    """The events, each held to its own type of the SDK, numbered without a gap."""
    events = []
    for number, frame in enumerate(frames.decode().split("\n\n")[:-1]):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT_TYPES[event["type"]].model_validate(event)
        events.append(event)
    return events


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def sdk(body: bytes, *, status: int = 200, content_type: str = "text/event-stream") -> OpenAI:
    """The vendor's client, answered with these bytes."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=body, headers={"content-type": content_type})

    transport = httpx2.MockTransport(answer)
    return OpenAI(
        api_key="k", base_url="http://gateway/v1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


class EventGrammar:
    """What an order of events must be: items one after another, parts inside them, one end."""

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.open: dict[str, Any] | None = None
        self.part = ""
        self.ended = ""

    def take(self, event: dict[str, Any]) -> None:
        assert not self.ended, "nothing follows the end"
        name = event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(self.items) + (name == "response.output_item.added") - 1
        if "item_id" in event:
            assert self.open is not None
            assert event["item_id"] == self.open["id"]
        if name == "response.output_item.added":
            assert self.open is None or "call" in self.open["type"], "only a call that was cut off is left open"
            self.open, self.part = event["item"], ""
            self.items[event["output_index"]] = {}
        elif name.endswith(".delta"):
            self.part += event["delta"]
        elif key := next((key for end, key in CLOSED_BY.items() if name.endswith(end)), None):
            assert event[key] == (self.part if self.part.strip() or key != "arguments" else "{}")
        elif name == "response.output_item.done":
            assert self.open is not None
            assert (event["item"]["id"], event["item"]["type"]) == (self.open["id"], self.open["type"])
            self.items[event["output_index"]], self.open = event["item"], None
        elif name in TERMINAL:
            self.ended = name
            for index, item in self.items.items():
                assert not item or event["response"]["output"][index] == item


def check(events: Sequence[dict[str, Any]]) -> EventGrammar:
    assert events[0]["type"] == "response.created"
    grammar = EventGrammar()
    for event in events:
        grammar.take(event)
    assert grammar.ended, "one terminal event"
    return grammar
