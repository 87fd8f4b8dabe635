"""Schemas of the Gemini API as JSON schemas. Pure.

That API's own are near to OpenAPI's: types in capitals, `nullable`, counts as strings, an order for the properties.
What is JSON schema already stays as it is: clients put it in the same place.
"""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import kind, refuse
from gateway.dialects.gemini_spelling import camel

MAX_DEPTH = 64
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OWN_FORMATS = frozenset({"enum", "float", "double", "int32", "int64", "byte"})  # say nothing in JSON schema
_NESTED = ("items", "additionalProperties", "not")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "defs", "definitions")
_VERBATIM = ("enum", "default", "example", "examples", "const", "required")


def json_schema(value: object, path: str, depth: int = 0) -> dict[str, Any]:
    """Raises `InvalidRequest` with the path of what is wrong."""
    if not isinstance(value, dict):
        refuse(f"`{path}` must be an object, not {kind(value)}.", path)
    if depth > MAX_DEPTH:
        refuse(f"`{path}` is nested too deeply; {MAX_DEPTH} levels are allowed.", path)
    schema: dict[str, Any] = {}
    for said, item in value.items():
        key = said if said in _BY_NAME else camel(said)
        if item is not None:
            schema[key] = item if key in _VERBATIM else _converted(key, item, f"{path}.{key}", depth + 1)
    return _finished(schema)


def _converted(key: str, item: Any, path: str, depth: int) -> Any:
    if key == "type":
        return _type(item, path)
    if key in _COUNTS and isinstance(item, str) and item.isascii() and item.isdigit() and len(item) < 10:
        return int(item)
    if key in _NESTED and isinstance(item, dict):
        return json_schema(item, path, depth)
    if key in _LISTS and isinstance(item, list):
        return [json_schema(entry, f"{path}[{index}]", depth) for index, entry in enumerate(item)]
    if key in _BY_NAME and isinstance(item, dict):
        return {name: json_schema(entry, f"{path}.{name}", depth) for name, entry in item.items()}
    return item


def _type(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_type(item, path) for item in value]
    if not isinstance(value, str):
        refuse(f"`{path}` must be a string, not {kind(value)}.", path)
    if value == "TYPE_UNSPECIFIED":
        return None
    name = value.lower()
    if name not in _TYPES:
        refuse(f"`{path}` must be one of {', '.join(sorted(_TYPES))}; it is {value[:40]!r}.", path)
    return name


def _finished(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what only that API understands."""
    order = schema.pop("propertyOrdering", None)
    properties = schema.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        schema["properties"] = {name: properties[name] for name in (*first, *properties)}
    if schema.get("type", "") is None:
        del schema["type"]
    if schema.get("format") in _OWN_FORMATS:
        del schema["format"]
    if "example" in schema:
        schema.setdefault("examples", [schema.pop("example")])
    return _with_null(schema) if schema.pop("nullable", None) is True else schema


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    if isinstance(schema.get("anyOf"), list):
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema
