"""What is noted while a body becomes the chat form: for whom, what was changed, which names to restore. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.dialects.fields import kind, refuse

MAX_UPSTREAM_NAME = 64  # characters of a function's name, by OpenAI's API; others allow 128
_UPSTREAM_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(slots=True)
class Reading:
    """`local` = for the local engine, which reads text only; otherwise for an upstream that speaks OpenAI's chat."""

    local: bool
    _remarks: dict[str, list[str]] = field(default_factory=dict)  # what happened -> what it happened to
    _restore: dict[str, str] = field(default_factory=dict)

    def remark(self, what: str, subject: str = "") -> None:
        """Goes to the client as a notice; the subjects of one remark are listed once each."""
        subjects = self._remarks.setdefault(what, [])
        if subject and (shown := _shown(subject)) not in subjects:
            subjects.append(shown)

    @property
    def notices(self) -> tuple[str, ...]:
        return tuple(_notice(what, subjects) for what, subjects in self._remarks.items())

    @property
    def restored_names(self) -> dict[str, str]:
        """Function names as sent -> as the client wrote them."""
        return dict(self._restore)

    def tool_name(self, name: str) -> str:
        """The name to send. It depends on `name` alone, so that history and tools agree in every turn."""
        if self.local or _UPSTREAM_NAME.fullmatch(name):
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        sent = f"{_UNSAFE.sub('_', name)[: MAX_UPSTREAM_NAME - 9]}_{digest}"
        self._restore[sent] = name
        return sent


def _shown(subject: str) -> str:
    """A client's word, fit for a header."""
    return subject if subject.isascii() and subject.isprintable() and len(subject) <= 64 else "(unprintable)"


def _notice(what: str, subjects: list[str]) -> str:
    if not subjects:
        return what
    return f"{what}: {', '.join(subjects[:8])}{' ...' if len(subjects) > 8 else ''}"


def mapping_at(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"`{path}` must be an object, not {kind(value)}.", path)
    return value


def string_at(holder: Mapping[str, Any], key: str, path: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        refuse(f"`{path}.{key}` must be a string, not {kind(value)}.", f"{path}.{key}")
    return value


def filled_string_at(holder: Mapping[str, Any], key: str, path: str) -> str:
    value = string_at(holder, key, path)
    if not value:
        refuse(f"`{path}.{key}` must not be empty.", f"{path}.{key}")
    return value
