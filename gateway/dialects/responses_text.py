"""`text` of OpenAI's Responses: the format that an answer is held to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.dialects.fields import Fields, kind, refuse

_VERBOSITIES = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Text:
    chat: dict[str, Any]  # chat fields
    echo: dict[str, Any]  # `text` of the response object


def read_text(fields: Fields) -> Text:
    value = fields.mapping("text") or {}
    chat, echo = _format(value.get("format"))
    verbosity = value.get("verbosity")
    if verbosity is not None:
        if verbosity not in _VERBOSITIES:
            refuse(f"`text.verbosity` must be one of {', '.join(_VERBOSITIES)}.", "text.verbosity")
        chat, echo = chat | {"verbosity": verbosity}, echo | {"verbosity": verbosity}
    return Text(chat, echo)


def _format(value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    if value is None:
        return {}, {"format": {"type": "text"}}
    if not isinstance(value, dict):
        refuse(f"`text.format` must be an object, not {kind(value)}.", "text.format")
    said = value.get("type")
    if said == "text":
        return {}, {"format": {"type": "text"}}
    if said == "json_object":
        return {"response_format": {"type": "json_object"}}, {"format": {"type": "json_object"}}
    if said != "json_schema":
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(f"`text.format.type` must be 'text', 'json_object' or 'json_schema'; it is {shown}.", "text.format.type")
    schema = _schema(value)
    wrapped = {"type": "json_schema", "json_schema": schema}
    return {"response_format": wrapped}, {"format": {"type": "json_schema", **schema}}


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    name, schema = value.get("name", "answer"), value.get("schema")
    if not isinstance(name, str) or not name:
        refuse("`text.format.name` must be a string that is not empty.", "text.format.name")
    if not isinstance(schema, dict):
        refuse(f"`text.format.schema` must be an object, not {kind(schema)}.", "text.format.schema")
    read: dict[str, Any] = {"name": name, "schema": schema}
    for key, expected in (("strict", bool), ("description", str)):
        if value.get(key) is not None:
            if not isinstance(value[key], expected):
                refuse(f"`text.format.{key}` must be {kind(expected())}.", f"text.format.{key}")
            read[key] = value[key]
    return read
