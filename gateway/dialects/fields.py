"""Typed reading of a request's JSON fields. null means absent everywhere; a wrong value is refused by its name.

Knows nothing of any one dialect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gateway.core.errors import InvalidRequest

_INT64 = 2**63


def refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequest(message, param=param)


def kind(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    names: dict[type, str] = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


MAX_TURNS = 20_000  # reading more would hold up every other request


def check_turns(value: Sequence[object], name: str) -> None:
    """Of a conversation, whatever its API calls its items."""
    if len(value) > MAX_TURNS:
        refuse(f"`{name}` has {len(value)} items; at most {MAX_TURNS} are allowed.", name)


class Fields:
    """A request's fields, and which of them were asked for: the rest is what nobody understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The field as it is, or None if it's absent or null."""
        self._read.add(name)
        return self._values.get(name)

    def accept(self, names: Sequence[str]) -> None:
        """These are known and have no effect here."""
        self._read.update(names)

    def unknown(self) -> list[str]:
        return sorted(name for name, value in self._values.items() if name not in self._read and value is not None)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(f"`{name}` must be true or false, not {kind(value)}.", name)
        return value

    def integer(self, name: str, minimum: int = -_INT64, maximum: int = _INT64 - 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(f"`{name}` must be an integer, not {kind(value)}.", name)
        if not minimum <= value <= maximum:
            limit = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            refuse(f"`{name}` must be {limit}; it is {value}.", name)
        return value

    def number(self, name: str, minimum: float, maximum: float, *, above: bool = False) -> float | None:
        """A number in [minimum, maximum], or in (minimum, maximum] if `above`."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            refuse(f"`{name}` must be a number, not {kind(value)}.", name)
        if not minimum <= value <= maximum or (above and value == minimum):
            low = f"above {minimum:g}" if above else f"at least {minimum:g}"
            high = "" if math.isinf(maximum) else f" and at most {maximum:g}"
            refuse(f"`{name}` must be {low}{high}; it is {value:g}.", name)
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            refuse(f"`{name}` must be a string, not {kind(value)}.", name)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            refuse(f"`{name}` must be an object, not {kind(value)}.", name)
        return value

    def unsupported(self, name: str, *neutral: object) -> None:
        """Refuse the field unless it's absent or says what happens anyway."""
        value = self.get(name)
        if value is None or any(value is item or (type(value) is type(item) and value == item) for item in neutral):
            return
        refuse(f"`{name}` is not supported by the local engine. Leave it out.", name)
