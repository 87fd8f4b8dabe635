"""What every settings format can do: get, set and remove one value by its path, and keep all other text as it is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any, Final, Protocol

KeyPath = tuple[str, ...]


class Missing(Enum):
    """There is no value at that path."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


class Format(StrEnum):
    JSON = "json"  # comments and trailing commas are kept
    TOML = "toml"
    YAML = "yaml"
    ENV = "env"  # NAME=value lines


class DocumentError(ValueError):
    """The text is not of its format, or the place for a value is taken by something else."""


class Document(Protocol):
    """A settings file as text. Constructing one refuses malformed text with DocumentError."""

    @property
    def text(self) -> str: ...

    def plain(self) -> dict[str, Any]:
        """All of it as plain values."""
        ...

    def set(self, path: KeyPath, value: Any) -> None: ...

    def remove(self, path: KeyPath) -> None:
        """Nothing happens if there is nothing."""
        ...


def value_at(plain: Mapping[str, Any], path: KeyPath) -> Any:
    """The value, or MISSING; also where an outer value is no mapping."""
    value: Any = plain
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def check_way(plain: Mapping[str, Any], path: KeyPath) -> None:
    """Refuses to put a value inside something that is no mapping, such as `"env": "x"`."""
    for depth in range(1, len(path)):
        value = value_at(plain, path[:depth])
        if value is MISSING:
            return
        if not isinstance(value, Mapping):
            raise DocumentError(f"{'.'.join(path[:depth])} holds something else than a table of settings")
