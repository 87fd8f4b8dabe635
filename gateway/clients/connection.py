"""How a client is configured now, read back from its own settings: what it will ask, where and with what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.clients.target import MODE_HEADER


@dataclass(frozen=True, slots=True)
class Connection:
    base_url: str
    key: str = ""
    key_header: str = "Authorization"
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    context: int | None = None
    output: int | None = None
    remarks: tuple[str, ...] = ()  # what else in the settings decides, and against us

    @property
    def mode_header(self) -> str | None:
        return next((value for name, value in self.headers.items() if name.lower() == MODE_HEADER.lower()), None)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def texts_of(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def number_of(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def table_of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
