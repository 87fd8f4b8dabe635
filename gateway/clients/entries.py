"""One value that is ours in a client's settings, and how it is put there. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gateway.clients.document import MISSING, Document, KeyPath, value_at
from gateway.clients.header_list import split_headers, with_header


@dataclass(frozen=True, slots=True)
class Entry:
    """`value` at `path`; MISSING takes away what is there."""

    path: KeyPath
    value: Any
    keep: bool = False  # whatever stands there already stays

    def wanted(self, present: Any) -> Any:
        return present if self.keep and present is not MISSING else self.value

    def ours(self, present: Any) -> Any:
        """The part of the present value that this entry is about."""
        return present


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One header in a text that holds several, some of them the user's own."""

    path: KeyPath
    name: str
    value: str | None
    separator: str

    def wanted(self, present: Any) -> Any:
        text = with_header(present if isinstance(present, str) else "", self.name, self.value, self.separator)
        return text or MISSING

    def ours(self, present: Any) -> Any:
        headers = split_headers(present if isinstance(present, str) else "", self.separator)
        found = {name.lower(): value for name, value in headers.items()}
        return found.get(self.name.lower(), MISSING)


AnyEntry = Entry | HeaderEntry


def put(document: Document, path: KeyPath, value: Any) -> bool:
    """Whether that changed anything."""
    if value_at(document.plain(), path) == value:
        return False
    if value is MISSING:
        document.remove(path)
    else:
        document.set(path, value)
    return True


def fingerprint(value: Any) -> str:
    """Tells values apart without keeping them: one may be a key."""
    text = "" if value is MISSING else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
