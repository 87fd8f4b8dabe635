"""What a client is to the rest: a name, a settings file, entries to write into it, and how to read them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gateway.clients.connection import Connection
from gateway.clients.document import Format
from gateway.clients.entries import AnyEntry
from gateway.clients.merging import Owned
from gateway.clients.target import Target

Environ = Mapping[str, str]


class Api(StrEnum):
    """Which of the gateway's APIs a client speaks."""

    CHAT = "chat completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    GEMINI = "generateContent"


def no_remarks(_target: Target, _plain: Mapping[str, Any]) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Client:
    """A program with a settings file."""

    name: str
    title: str
    api: Api
    format: Format
    find_file: Callable[[Path, Environ], Path]
    entries: Callable[[Target], Sequence[AnyEntry]]
    read_back: Callable[[Mapping[str, Any], Environ], Connection | None]  # None: nothing that says where to go
    owned: tuple[Owned, ...] = ()
    remarks: Callable[[Target, Mapping[str, Any]], Sequence[str]] = no_remarks  # on the settings as they are now
    first_request_tokens: int = 0  # about what its first request takes; such clients need a large context
    then: str = ""  # what to do after the settings are written


@dataclass(frozen=True, slots=True)
class Spoken:
    """What has no settings file of its own here: text to use elsewhere."""

    name: str
    title: str
    lines: Callable[[Target, bool], Sequence[tuple[str, str]]]  # (what it is, text); the flag shows the key
    why_no_file: str
