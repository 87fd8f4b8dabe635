"""Names of fields as the Gemini API takes them: `inlineData`, or `inline_data` as its documents have it too. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from gateway.dialects.fields import refuse
from gateway.dialects.reading import mapping_at

_UNDERSCORED = re.compile(r"(?<=[a-z0-9])_([a-z])")


def camel(name: str) -> str:
    return _UNDERSCORED.sub(lambda match: match[1].upper(), name)


def camel_keys(holder: Mapping[str, Any], path: str = "", keep: Container[str] = ()) -> dict[str, Any]:
    """The holder's fields that say something, each in one spelling. Those to `keep` are not that API's."""
    found: dict[str, Any] = {}
    for key, value in holder.items():
        if value is None:
            continue
        name = key if key in keep else camel(key)
        if name in found:
            where = f"{path}.{name}" if path else name
            refuse(f"`{where}` is given in two spellings. Send it once.", where)
        found[name] = value
    return found


def fields_at(value: object, path: str) -> dict[str, Any]:
    """An object of the API's, such as a part or a tool."""
    return camel_keys(mapping_at(value, path), path)
