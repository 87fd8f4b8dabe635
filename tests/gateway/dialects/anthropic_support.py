"""Renders scripted answers as the Anthropic dialect does, and reads the frames back as strictly as its clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from backends.protocol.messages import Usage
from gateway.core.types import Delta, FinishReason, Started
from gateway.dialects.anthropic_events import MessagesRenderer
from gateway.dialects.base import AnswerContext

USAGE = Usage(prompt_tokens=30, completion_tokens=7, cached_tokens=10)
USAGE_OBJECT = {
    "input_tokens": 20,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 10,
    "output_tokens": 7,
}
Event = dict[str, Any]


def make_renderer(chat_context: Any = None) -> MessagesRenderer:
    return MessagesRenderer(AnswerContext("ab" * 16, 1, "smollm2", chat_context=chat_context))


def stream(
    deltas: Iterable[Delta],
    reason: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    chat_context: Any = None,
) -> bytes:
    renderer = make_renderer(chat_context)
    frames = renderer.begin(Started(prompt_tokens=30, max_tokens=100)) + renderer.start(0)
    frames += b"".join(map(renderer.delta, deltas))
    return frames + renderer.end(0, reason, stop_reason) + renderer.finish(USAGE)


def read_events(frames: bytes) -> list[Event]:
    """Every frame must have a name, one line of data, and the same name in it."""
    assert frames.endswith(b"\n\n")
    events = []
    for frame in frames[:-2].split(b"\n\n"):
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events


def events_of(deltas: Iterable[Delta], reason: FinishReason = FinishReason.STOP, **options: Any) -> list[Event]:
    return read_events(stream(deltas, reason, **options))


_DELTA_TYPES = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def blocks_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The blocks of a complete stream, checked as a client's state machine does. Inputs stay the text of their JSON."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            blocks.append(
                event["content_block"] | ({"input": ""} if event["content_block"]["type"] == "tool_use" else {})
            )
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            _fill(blocks[-1], event["delta"])
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return blocks


def _fill(block: dict[str, Any], delta: dict[str, Any]) -> None:
    key = _DELTA_TYPES[block["type"]][delta["type"]]
    block["input" if key == "partial_json" else key] += delta[key]


def stop_of(events: Sequence[Event]) -> tuple[str, str | None]:
    return events[-2]["delta"]["stop_reason"], events[-2]["delta"]["stop_sequence"]
