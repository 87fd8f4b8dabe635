"""`tools` and `tool_choice` of the Anthropic API as those of OpenAI's chat. Pure.

Tools that Anthropic runs itself, or that only its own models were taught, have no schema to pass on: they are left out
with a notice, and refused where the request forces one of them.
"""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.reading import Reading, filled_string_at, mapping_at
from gateway.dialects.tool_function import named_function, object_schema

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_READ = frozenset({"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming"})


def read_tools(fields: Fields, reading: Reading) -> dict[str, Any]:
    """The chat fields that say which tools there are and which must be called."""
    value = fields.get("tools")
    if value is not None and not isinstance(value, list):
        refuse(f"`tools` must be an array, not {kind(value)}.", "tools")
    tools, left_out = [], []
    for index, item in enumerate(value or []):
        tool = mapping_at(item, f"tools[{index}]")
        if _is_custom(tool):
            tools.append(_tool(tool, f"tools[{index}]", reading))
        else:
            left_out.append(_name_of(tool))
            reading.remark("tools that only Anthropic offers are left out", left_out[-1])
    choice = _choice(fields.mapping("tool_choice"), tools, left_out, reading)
    return {"tools": tools, **choice} if tools else {}


def _is_custom(tool: dict[str, Any]) -> bool:
    return tool.get("type") in (None, "custom") or isinstance(tool.get("input_schema"), dict)


def _name_of(tool: dict[str, Any]) -> str:
    return next((value for key in ("name", "type") if isinstance(value := tool.get(key), str)), "?")


def _tool(tool: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    for key in tool.keys() - _READ:
        if tool[key] not in (None, False):
            reading.remark("keys of tools without effect", key)
    function = named_function(tool, path, reading)
    given = tool.get("input_schema")
    schema_path = f"{path}.input_schema"
    schema = object_schema(mapping_at({} if given is None else given, schema_path), schema_path)
    return {"type": "function", "function": function | {"parameters": schema}}


def _choice(
    value: dict[str, Any] | None, tools: list[dict[str, Any]], left_out: list[str], reading: Reading
) -> dict[str, Any]:
    if value is None:
        return {}
    said = value.get("type")
    if said not in (*_CHOICES, "tool"):
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(f"`tool_choice.type` must be auto, any, tool or none; it is {shown}.", "tool_choice.type")
    if said in ("any", "tool") and not tools and not left_out:
        refuse("`tool_choice` forces a call, but there are no `tools`.", "tool_choice")
    chosen = _named(value, tools, left_out, reading) if said == "tool" else _CHOICES[said]
    if said == "any" and not tools:
        refuse(f"`tool_choice` forces a call, but only Anthropic offers {', '.join(left_out)[:200]}.", "tool_choice")
    parallel = {"parallel_tool_calls": False} if _flag(value, "disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **parallel}


def _named(value: dict[str, Any], tools: list[dict[str, Any]], left_out: list[str], reading: Reading) -> Any:
    name = filled_string_at(value, "name", "tool_choice")
    sent = reading.tool_name(name)
    if not any(tool["function"]["name"] == sent for tool in tools):
        why = "which only Anthropic offers. Leave it out" if name in left_out else "which is not among the `tools`"
        refuse(f"`tool_choice` names {name[:64]!r}, {why}.", "tool_choice.name")
    return {"type": "function", "function": {"name": sent}}


def _flag(value: dict[str, Any], key: str) -> bool:
    flag = value.get(key)
    if flag is not None and not isinstance(flag, bool):
        refuse(f"`tool_choice.{key}` must be true or false, not {kind(flag)}.", f"tool_choice.{key}")
    return bool(flag)
