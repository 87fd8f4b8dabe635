"""What the turns of other APIs become: messages of OpenAI's chat, and their content. Pure."""

from __future__ import annotations

from typing import Any

ChatPart = dict[str, Any]
Message = dict[str, Any]

BETWEEN_TEXTS = "\n\n"  # between the texts of a system prompt, a user's turn or a tool's result


def text_part(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def content_of(parts: list[ChatPart]) -> str | list[ChatPart]:
    """Text alone becomes one string, which every upstream takes."""
    if all(part["type"] == "text" for part in parts):
        return BETWEEN_TEXTS.join(part["text"] for part in parts)
    return parts


def is_prefill(messages: list[Message]) -> bool:
    """The client has begun the answer: the model goes on with it instead of starting one."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
