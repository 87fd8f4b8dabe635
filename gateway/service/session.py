"""Which conversation a request belongs to, so that its turns can meet their cache. Pure.

Clients say it in many ways. One that says nothing is known by its system prompt and its first user message: they stay
the same while the conversation grows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backends.protocol.messages import ChatPrompt, Prompt, TextPrompt

# The narrowest first: a conversation's own id before the id of a user, who may have many.
_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "x-session-id", "session_id", "session-id")
_FIELDS = ("prompt_cache_key", "session_id")
_MAX_ID = 512  # characters of an id that count; more can only be a mistake
_MAX_TEXT = 16 * 1024  # characters of a message that count


def session_of(headers: Mapping[str, str], fields: Mapping[str, Any], prompt: Prompt) -> str | None:
    """The same for every turn of a conversation; None where nothing says it. A digest: it holds nothing of a client."""
    said = next(_said_ids(headers, fields), None)
    if said is not None:
        return _digest("id", [said[:_MAX_ID]])
    if isinstance(prompt, ChatPrompt):
        return _of_messages(prompt.messages)
    return _digest("text", [prompt.text[:_MAX_TEXT]]) if isinstance(prompt, TextPrompt) else None


def _said_ids(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Iterator[str]:
    by_name = {name.lower(): value for name, value in headers.items()}
    metadata = fields.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = [*(by_name.get(name) for name in _HEADERS), *(fields.get(name) for name in _FIELDS), user_id]
    return (value.strip() for value in found if isinstance(value, str) and value.strip())


def _of_messages(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Of what precedes the first answer: all system messages up to the first user message, and that one."""
    first: list[str] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            break
        if role in ("system", "user") and isinstance(content, str):
            first.append(f"{role}:{content[:_MAX_TEXT]}")
        if role == "user":
            return _digest("messages", first)
    return None


def _digest(kind: str, parts: Sequence[str]) -> str:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
