"""A draft as frozen `Settings`, or what is wrong with it in words: setting, place, allowed values."""

from __future__ import annotations

import typing
from enum import StrEnum
from types import UnionType
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.settings.entries import Draft, Path
from gateway.settings.options import is_secret, list_tables, table_model
from gateway.settings.schema import Settings

_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def validate(draft: Draft) -> Settings | None:
    """Settings, or None after problems were noted."""
    try:
        return Settings.model_validate(draft.tree())
    except ValidationError as error:
        details = error.errors(include_url=False)
        draft.problems += [_problem(draft, detail) for detail in details if not _is_told(draft, detail["loc"])]
        return None


def _is_told(draft: Draft, path: Path) -> bool:
    """Whether a problem was noted already: of this value, or of each in its table of a list."""
    has_table = len(path) < 3 or any(other[:2] == path[:2] for other in draft.values)
    return path in draft.failed or not has_table


def allowed_values(table: str, key: str) -> str:
    """`a whole number, at least 0, at most 65535`."""
    field = table_model(table).model_fields[key]
    return ", ".join([_kind(field.annotation), *_bounds(field)])


def _problem(draft: Draft, detail: ErrorDetails) -> str:
    path: Path = detail["loc"]
    origin = draft.origin_of(path)
    if detail["type"] == "missing":
        return f"{origin}: is missing"
    names = [part for part in path if isinstance(part, str)]
    if len(names) < 2 or names[1] not in table_model(names[0]).model_fields:
        return f"{origin}: {detail['msg']}"
    option = path[: 3 if names[0] in list_tables() else 2]
    shown = _shown(draft, option, detail["input"])
    return f"{draft.origin_of(option)}: must be {allowed_values(names[0], names[1])}{shown}"


def _shown(draft: Draft, path: Path, value: Any) -> str:
    """The refused value, unless it may be a secret."""
    is_plain = isinstance(value, int | float) or (isinstance(value, str) and len(value) < 40)
    if not is_plain or is_secret(path) or path in draft.expanded:
        return ""
    return f", not {value!r}"


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    arguments = [argument for argument in typing.get_args(annotation) if argument not in {type(None), Ellipsis}]
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is dict:
        return "a table of texts"
    if origin is tuple:
        return f"a list, each item {_kind(arguments[0])}"
    if origin in {typing.Union, UnionType, typing.Annotated}:
        bounds = [text for argument in arguments if isinstance(argument, FieldInfo) for text in _bounds(argument)]
        return ", ".join([_kind(arguments[0]), *bounds])
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return f"one of {', '.join(annotation)}"
    return _KINDS.get(annotation, "text")


def _bounds(field: FieldInfo) -> list[str]:
    return [
        text.format(getattr(item, name))
        for item in field.metadata
        for name, text in _BOUNDS.items()
        if hasattr(item, name)
    ]
