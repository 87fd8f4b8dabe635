"""What client APIs say of a tool, as parts of a function of OpenAI's chat: name, description, schema. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.dialects.fields import kind, refuse
from gateway.dialects.reading import Reading, filled_string_at

_NAME = re.compile(r'[^"\\\x00-\x1f]{1,128}')


def named_function(tool: Mapping[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    """Its name, as it is sent, and its description if it has one."""
    name = filled_string_at(tool, "name", path)
    check_tool_name(name, path, f"{path}.name")
    description = description_at(tool, path)
    return {"name": reading.tool_name(name)} | ({"description": description} if description else {})


def check_tool_name(name: str, path: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        refuse(f"`{path}.name` must have 1 to 128 characters and no quote or backslash.", param)


def description_at(tool: Mapping[str, Any], path: str) -> str:
    """Empty if there is none."""
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        refuse(f"`{path}.description` must be a string, not {kind(description)}.", f"{path}.description")
    return description or ""


def object_schema(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Always the schema of an object, whatever was left unsaid."""
    if schema.get("type", "object") != "object":
        refuse(f"`{path}.type` must be 'object'.", f"{path}.type")
    if "properties" in schema and "type" in schema:
        return schema
    return {"type": "object", "properties": {}} | schema
