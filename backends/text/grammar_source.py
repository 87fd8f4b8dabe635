"""From what is asked of an answer to the source of a grammar, within limits. Pure; knows no tokenizer.

JSON may have a line end and spaces between its parts, as models like to write; calls of tools have neither, so that
they can be told while they are written. Arguments that a tool doesn't name are not written unless its schema says
`additionalProperties`: small models would go on inventing some.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from backends.protocol.messages import GrammarSpec

MAX_SCHEMA_BYTES = 64 * 1024  # of all schemas of a request together
MAX_DEPTH = 100
MAX_MULTIPLE_OF = 10_000  # as a number without its decimal point; its automaton has as many states

_SPACED = {"whitespace_flexible": True, "whitespace_pattern": r"\n? {0,16}"}
_TIGHT = {"whitespace_flexible": False}
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if"})
_PARAM = {"json_object": "response_format", "json_schema": "response_format", "tool_calls": "tools"}


class GrammarError(Exception):
    """The grammar can't be used: why, and which field of the request it is about."""

    def __init__(self, message: str, spec: GrammarSpec) -> None:
        super().__init__(message)
        self.param = _PARAM[spec.kind]


def grammar_source(spec: GrammarSpec) -> str:
    """A Lark grammar. Raises `GrammarError`."""
    num_bytes = len(spec.schema.encode()) + sum(len(tool.parameters.encode()) for tool in spec.tools)
    if num_bytes > MAX_SCHEMA_BYTES:
        raise GrammarError(f"The schema has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed.", spec)
    match spec.kind:
        case "json_object":
            return _json_rule("start", {"type": "object"}, _SPACED)
        case "json_schema":
            return _json_rule("start", _checked(spec.schema, spec), _SPACED)
        case "tool_calls":
            return _calls(spec)


def _json_rule(name: str, schema: dict[str, Any], options: dict[str, Any]) -> str:
    return f"{name}: %json {json.dumps(schema | {'x-guidance': options})}\n"


def _calls(spec: GrammarSpec) -> str:
    several = f'"[" call ("," call){{0,{spec.max_calls - 1}}} "]"'
    rules = f"start: {several if spec.max_calls > 1 else 'call'}\n"
    rules += "call: " + " | ".join(f"call_{index}" for index in range(len(spec.tools))) + "\n"
    for index, tool in enumerate(spec.tools):
        opening = json.dumps(f'{{"name":{json.dumps(tool.name)},"arguments":')
        rules += f'call_{index}: {opening} arguments_{index} "}}"\n'
        schema = _closed({"type": "object"} | _checked(tool.parameters, spec))
        rules += _json_rule(f"arguments_{index}", schema, _TIGHT)
    return rules


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without arguments beyond the named ones, where the schema leaves that open and names them itself."""
    if not isinstance(parameters.get("properties"), dict) or _COMBINING.intersection(parameters):
        return parameters
    return {"additionalProperties": False} | parameters


def _checked(text: str, spec: GrammarSpec) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("The schema is no JSON.", spec) from None
    if not isinstance(schema, dict):
        raise GrammarError("The schema must be an object.", spec)
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(f"The schema is nested deeper than {MAX_DEPTH} levels.", spec)
        if isinstance(value, dict):
            _check_multiple(value.get("multipleOf"), spec)
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
    return schema


def _check_multiple(value: object, spec: GrammarSpec) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    digits = Decimal(str(value)).normalize().as_tuple()
    size = int("".join(map(str, digits.digits)))
    if isinstance(digits.exponent, str) or size * 10 ** max(digits.exponent, 0) > MAX_MULTIPLE_OF:
        raise GrammarError(f"multipleOf {value} is too large; at most {MAX_MULTIPLE_OF} is allowed.", spec)
