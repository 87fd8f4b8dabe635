"""The names of all options, and the right name for a wrong one. Read off the schema; knows no files."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any

from pydantic import BaseModel

from gateway.settings.schema import Settings

Tables = Mapping[str, Sequence[str]]  # table -> its keys

_MODE_ELSEWHERE = ("cachestrategy", "cachemode")  # what an editor's file and the header call the mode
_MODE_TABLES = ("cache", "cache_layout")  # where it belongs; the first is there only while that form is read


@cache
def native_tables() -> dict[str, tuple[str, ...]]:
    """Every table of the native file and its keys."""
    return {name: tuple(table_model(name).model_fields) for name in Settings.model_fields}


@cache
def list_tables() -> frozenset[str]:
    """Tables written `[[name]]`."""
    return frozenset(
        name for name, info in Settings.model_fields.items() if typing.get_origin(info.annotation) is tuple
    )


def table_model(name: str) -> type[BaseModel]:
    for candidate in _arguments(Settings.model_fields[name].annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    raise TypeError(f"{name} is not a table")


def annotation_of(table: str, key: str) -> Any:
    return table_model(table).model_fields[key].annotation


def accepts(table: str, key: str, kind: type) -> bool:
    """Whether a value of this plain type is among those the option takes."""
    return kind in _arguments(annotation_of(table, key))


def is_list(table: str, key: str) -> bool:
    return typing.get_origin(annotation_of(table, key)) is tuple


def is_mapping(table: str, key: str) -> bool:
    """Whether the option itself is a table, written `{ name = "value" }`."""
    return typing.get_origin(annotation_of(table, key)) is dict


def is_secret(path: Sequence[str | int]) -> bool:
    return path[-1] in {"api_key", "key"}


def suggestion(table: str, key: str, tables: Tables) -> str:
    """Where `key` belongs: the same name in another table, else the nearest name here, else the nearest anywhere."""
    homes = [f"[{name}]" for name, keys in tables.items() if key in keys and name != table]
    if homes:
        return f"it belongs in {' or '.join(homes)}"
    home = next((name for name in _MODE_TABLES if name in tables), None)
    if home is not None and _plain(key) in _MODE_ELSEWHERE:
        return f"did you mean mode in [{home}]?"
    near = _nearest(key, tables.get(table, ()))
    if near is not None:
        return f"did you mean {near}?"
    spread = {name: owner for owner, keys in tables.items() for name in keys}
    near = _nearest(key, spread)
    if near is not None:
        return f"did you mean {near} in [{spread[near]}]?"
    allowed = ", ".join(tables.get(table, ())) or ", ".join(f"[{name}]" for name in tables)
    return f"allowed here: {allowed}"


def nearest_or_all(name: str, names: Iterable[str]) -> str:
    known = list(names)
    near = _nearest(name, known)
    return f"did you mean {near}?" if near is not None else f"allowed: {', '.join(known)}"


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Compared without case, dashes and underscores, so that camelCase finds snake_case."""
    plain = {_plain(candidate): candidate for candidate in names}
    found = get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _arguments(annotation: Any) -> list[Any]:
    """The plain types inside unions and tuples."""
    if typing.get_origin(annotation) in {typing.Union, UnionType, tuple, typing.Annotated}:
        return [inner for part in typing.get_args(annotation) for inner in _arguments(part)]
    return [annotation]
