"""Tools of OpenAI's Responses as chat functions, and the way back from a called name to the tool that it is. Pure.

A chat function has one flat name. A tool in a namespace gets a name made of both, a custom tool (free text, maybe held
to a grammar) becomes a function with one string argument. What only the vendor's own servers run is left out, and said.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway.dialects.fields import kind, refuse
from gateway.dialects.tool_function import description_at

CUSTOM_ARGUMENT = "input"
MAX_NAME_LENGTH = 64  # of a function in OpenAI's chat completions
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")
_SYNTAXES = ("lark", "regex")
_CONTAINERS = ("function", "custom", "namespace")


@dataclass(frozen=True, slots=True)
class ToolName:
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolTable:
    """The tools of one request, by the names that the model sees."""

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)  # flat name -> chat tool, in the client's order
    names: dict[str, ToolName] = field(default_factory=dict)  # flat name -> the client's
    paths: dict[str, str] = field(default_factory=dict)  # flat name -> where the client said it
    echo: list[dict[str, Any]] = field(
        default_factory=list
    )  # those of `tools` that are in use, as the client said them
    notices: tuple[str, ...] = ()

    def flat(self, name: str, namespace: str | None) -> str:
        """The model's name of a tool, whether or not it is still among the tools."""
        for flat, known in self.names.items():
            if known.name == name and known.namespace == namespace:
                return flat
        return flat_name(name, namespace)

    def restore(self, flat: str) -> ToolName:
        """A name that no tool has was invented by the model: it's told as it is."""
        return self.names.get(flat) or ToolName(flat)


def flat_name(name: str, namespace: str | None) -> str:
    """The same for the same tool in every turn, so that a conversation's prompt only grows at its end."""
    if namespace is None:
        return name
    joined = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    flat = _NOT_IN_NAME.sub("_", joined)
    return flat if flat == joined and len(flat) <= MAX_NAME_LENGTH else _with_digest(flat, name, namespace)


def _with_digest(flat: str, name: str, namespace: str | None) -> str:
    digest = hashlib.blake2b(f"{namespace}\0{name}".encode(), digest_size=4).hexdigest()
    return f"{flat[: MAX_NAME_LENGTH - 9]}_{digest}"


def read_tools(given: Iterable[tuple[str, object]]) -> ToolTable:
    """`given` are paths and tools: those of `tools`, then those that items of the input add."""
    table = ToolTable()
    left_out: list[str] = []
    twice: list[str] = []
    for path, tool in given:
        said = _type(tool, path)
        assert isinstance(tool, dict)
        if said not in _CONTAINERS:
            left_out += [] if said in left_out else [said]
            continue
        members = _members(tool, path) if said == "namespace" else [(path, tool, None)]
        for member_path, member, namespace in members:
            twice += _add(table, member, namespace, member_path)
        table.echo.append({**tool, "description": tool.get("description") or ""} if said == "namespace" else tool)
    if left_out:
        table.notices += (f"tools left out, only the vendor's own servers run them: {_names(left_out)}",)
    if twice:
        table.notices += (f"tools given twice, the last one counts: {_names(twice)}",)
    return table


def _names(names: list[str]) -> str:
    shown = [name[:64] if name.isprintable() else "?" for name in names[:8]]
    return ", ".join(shown) + (" ..." if len(names) > 8 else "")


def _type(tool: object, path: str) -> str:
    if not isinstance(tool, dict):
        refuse(f"`{path}` must be an object, not {kind(tool)}.", path)
    said = tool.get("type")
    if not isinstance(said, str):
        refuse(f"`{path}.type` must be a string such as 'function', not {kind(said)}.", f"{path}.type")
    return said


def _members(tool: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any], str | None]]:
    namespace, tools = _name(tool, path), tool.get("tools")
    if not isinstance(tools, list):
        refuse(f"`{path}.tools` must be an array, not {kind(tools)}.", f"{path}.tools")
    members: list[tuple[str, dict[str, Any], str | None]] = []
    for index, member in enumerate(tools):
        member_path = f"{path}.tools[{index}]"
        if _type(member, member_path) not in ("function", "custom"):
            refuse(f"`{member_path}.type` must be 'function' or 'custom' in a namespace.", f"{member_path}.type")
        members.append((member_path, member, namespace))
    return members


def _add(table: ToolTable, tool: dict[str, Any], namespace: str | None, path: str) -> list[str]:
    """Take the tool into the table. Returns its name if it was there already."""
    name = ToolName(_name(tool, path), namespace, custom=tool["type"] == "custom")
    flat = table.flat(name.name, namespace)
    known = table.names.get(flat)
    again = known is not None and (known.name, known.namespace) == (name.name, namespace)
    if known is not None and not again:  # the joined name is another tool's own
        flat = _with_digest(flat, name.name, namespace)
    table.names[flat] = name
    table.paths[flat] = path
    table.functions[flat] = {"type": "function", "function": _function(tool, flat, path)}
    return [flat] if again else []


def _name(tool: dict[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"`{path}.name` must be a string that is not empty.", f"{path}.name")
    return name


def _function(tool: dict[str, Any], flat: str, path: str) -> dict[str, Any]:
    description = description_at(tool, path)
    function: dict[str, Any] = {"name": flat}
    if tool["type"] == "custom":
        return function | _custom(tool, description, path)
    if description:
        function["description"] = description
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        refuse(f"`{path}.parameters` must be an object, not {kind(parameters)}.", f"{path}.parameters")
    function["parameters"] = parameters
    strict = tool.get("strict")
    return function | ({"strict": strict} if isinstance(strict, bool) else {})


def _custom(tool: dict[str, Any], description: str, path: str) -> dict[str, Any]:
    """Free text as the only argument. A grammar can't be enforced here, so that the model is told of it."""
    said = tool.get("format") or {"type": "text"}
    form = said.get("type") if isinstance(said, dict) else None
    if form not in ("text", "grammar"):
        refuse(f"`{path}.format.type` must be 'text' or 'grammar'.", f"{path}.format")
    if form == "grammar":
        definition, syntax = said.get("definition"), said.get("syntax")
        if not isinstance(definition, str) or syntax not in _SYNTAXES:
            refuse(f"`{path}.format` needs a `definition` and a `syntax`: lark or regex.", f"{path}.format")
        description += f"\n\n`{CUSTOM_ARGUMENT}` must follow this grammar ({syntax}):\n{definition}"
    properties = {CUSTOM_ARGUMENT: {"type": "string", "description": "The whole input, as plain text."}}
    schema = {"type": "object", "properties": properties, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}
    return {"description": description.strip(), "parameters": schema}
