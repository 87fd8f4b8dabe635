"""Conversations that clients go on with by an id. In memory, bounded in number and bytes, apart for each owner.

Knows no dialect: items are JSON values, kept encoded, so that what they take is known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec


class ConversationStore:
    """The least recently used conversation goes first. An owner never sees another one's."""

    def __init__(self, max_conversations: int, max_bytes: int) -> None:
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, owner: str, conversation_id: str) -> Any | None:
        """What was put, as a value of the caller's own; None if it never was, or has gone."""
        key = (owner, conversation_id)
        data = self._kept.get(key)
        if data is None:
            return None
        self._kept.move_to_end(key)
        return msgspec.json.decode(data)

    def put(self, owner: str, conversation_id: str, items: Any) -> bool:
        """Keep the items. False if they alone are above the limit: then nothing else has to go for them."""
        key, data = (owner, conversation_id), msgspec.json.encode(items)
        self._drop(key)
        if len(data) > self._max_bytes or self._max_conversations == 0:
            return False
        self._kept[key] = data
        self._num_bytes += len(data)
        while len(self._kept) > self._max_conversations or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
        return True

    def _drop(self, key: tuple[str, str]) -> None:
        self._num_bytes -= len(self._kept.pop(key, b""))
