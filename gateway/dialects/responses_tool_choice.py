"""`tool_choice` of OpenAI's Responses, told in the words of chat completions. Pure."""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import kind, refuse
from gateway.dialects.responses_tools import ToolTable

_WORDS = ("none", "auto", "required")
_ALLOWED = "'none', 'auto', 'required', or an object of type 'function', 'custom' or 'allowed_tools'"


def tool_fields(table: ToolTable, choice: object, parallel: bool | None) -> dict[str, Any]:
    """The chat fields about tools: none at all if there are no tools, since strict servers refuse them then."""
    said, flats = _choice(table, choice)
    if not flats:
        return {}
    fields: dict[str, Any] = {"tools": [table.functions[flat] for flat in flats]}
    if said is not None:
        fields["tool_choice"] = said
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def _choice(table: ToolTable, choice: object) -> tuple[Any, list[str]]:
    """The choice for chat, and the tools that the model may call."""
    flats = list(table.functions)
    if choice is None or choice in ("none", "auto"):
        return choice, flats
    if choice == "required":
        if not flats:
            refuse("`tool_choice` requires a call, but there is no tool that can be called here.", "tool_choice")
        return choice, flats
    if not isinstance(choice, dict):
        shown = repr(choice[:40]) if isinstance(choice, str) else kind(choice)
        refuse(f"`tool_choice` must be {_ALLOWED}; it is {shown}.", "tool_choice")
    if choice.get("type") == "allowed_tools":
        return _allowed(table, choice)
    flat = _named(table, choice, "tool_choice")
    return {"type": "function", "function": {"name": flat}}, flats


def _allowed(table: ToolTable, choice: dict[str, Any]) -> tuple[Any, list[str]]:
    """Chat servers know no such list: the model is told only of the tools that it may call."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        refuse("`tool_choice.mode` must be 'auto' or 'required'.", "tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        refuse("`tool_choice.tools` must be an array with at least one tool.", "tool_choice.tools")
    named: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict):
            refuse(f"`{path}` must be an object, not {kind(tool)}.", path)
        if tool.get("type") == "namespace":
            named |= _namespace(table, tool, path)
        elif tool.get("type") in ("function", "custom"):
            named.add(_named(table, tool, path))
    if not named:
        refuse("`tool_choice.tools` names no tool that can be called here.", "tool_choice.tools")
    return mode, [flat for flat in table.functions if flat in named]


def _namespace(table: ToolTable, tool: dict[str, Any], path: str) -> set[str]:
    found = {flat for flat, name in table.names.items() if name.namespace == tool.get("name")}
    if not found:
        refuse(f"`{path}` names a namespace that is not among the `tools`.", path)
    return found


def _named(table: ToolTable, tool: dict[str, Any], path: str) -> str:
    said, name, namespace = tool.get("type"), tool.get("name"), tool.get("namespace")
    if said not in ("function", "custom"):
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(f"`{path}.type` must be {_ALLOWED}; tools of type {shown} are not run here.", f"{path}.type")
    if not isinstance(name, str) or not name:
        refuse(f"`{path}.name` must be a string that is not empty.", f"{path}.name")
    exact = [flat for flat, known in table.names.items() if (known.name, known.namespace) == (name, namespace)]
    if not exact and namespace is None:  # named without its namespace, which is clear if there is but one
        exact = [flat for flat, known in table.names.items() if known.name == name]
    if len(exact) != 1:
        refuse(f"`{path}` names {name[:64]!r}, which is not among the `tools`.", f"{path}.name")
    return exact[0]
