"""Chat messages put together from what OpenAI's Responses says in items. Pure; knows no item.

What one answer of the model consisted of (reasoning, text, calls) is several items there and one message in chat.
Nothing depends on what follows: the messages of a turn are the beginning of those of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.dialects.responses_tools import ToolTable


@dataclass(frozen=True, slots=True)
class Source:
    """Where the client said a chat message: the item, and which of its fields is the content."""

    path: str
    key: str = "content"


@dataclass(slots=True)
class Messages:
    """Chat messages being put together from items."""

    table: ToolTable
    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    _open: dict[str, Any] | None = None  # the assistant's message that the next item may belong to
    _unanswered: list[str] = field(default_factory=list)  # call ids, oldest first
    _num_calls: int = 0

    def system(self, text: str, path: str) -> None:
        """Those at the beginning become one: many chat templates take a system message only there, and only once."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self._append({"role": "system", "content": text}, Source(path))

    def _append(self, message: dict[str, Any], source: Source) -> None:
        self.messages.append(message)
        self.sources.append(source)
        self._open = None

    def user(self, content: str | list[dict[str, Any]], path: str) -> None:
        self._append({"role": "user", "content": content}, Source(path))

    def assistant(self, path: str) -> dict[str, Any]:
        """The message that reasoning or text belongs to. One whose calls wait for their results is never left."""
        if self._open is None or (self._open["content"] is not None and "tool_calls" not in self._open):
            return self._new_assistant(path)
        return self._open

    def _new_assistant(self, path: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        self._append(message, Source(path))
        self._open = message
        return message

    def call(self, name: str, arguments: str, item: dict[str, Any], path: str) -> None:
        call_id = _text(item, "call_id") or _text(item, "id") or f"call_{self._num_calls}"
        self._num_calls += 1
        self._unanswered.append(call_id)
        message = self._open or self._new_assistant(path)
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, content: str | list[dict[str, Any]], item: dict[str, Any], path: str) -> None:
        """One that doesn't say of which call it is belongs to the oldest that waits for its result."""
        waiting = self._unanswered
        call_id = _text(item, "call_id") or next((said for said in waiting if said == item.get("id")), None)
        call_id = call_id or (waiting[0] if waiting else "call_unknown")
        if call_id in waiting:
            waiting.remove(call_id)
        self._append({"role": "tool", "tool_call_id": call_id, "content": content}, Source(path, "output"))

    def close(self) -> list[dict[str, Any]]:
        """The messages. One of reasoning alone has an empty text, since servers want a text or calls."""
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        return self.messages

    def note(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)


def _text(item: dict[str, Any], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) and value else None
