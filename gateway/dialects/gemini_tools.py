"""`tools` and `toolConfig` of the Gemini API as those of OpenAI's chat. Pure.

Tools that Google runs itself have no schema to pass on: they are left out with a notice, and refused where the request
forces one of them.
"""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.gemini_schema import json_schema
from gateway.dialects.gemini_spelling import fields_at
from gateway.dialects.reading import Reading, mapping_at
from gateway.dialects.tool_function import named_function, object_schema

_MODES = {"AUTO": "auto", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto", "ANY": "required", "NONE": "none"}
_READ = frozenset({"name", "description", "parameters", "parametersJsonSchema"})
_OF_ANSWER = frozenset({"response", "responseJsonSchema", "behavior"})  # describe the result, which models aren't told
_DECLARATIONS = "functionDeclarations"

Tools = list[dict[str, Any]]


def read_tools(fields: Fields, reading: Reading) -> dict[str, Any]:
    """The chat fields that say which tools there are and which must be called."""
    tools, left_out = _tools(fields.get("tools"), reading)
    mode, allowed = _calling(fields.mapping("toolConfig"), reading)
    if mode == "none":
        return {"tools": tools, "tool_choice": "none"} if tools else {}
    if allowed:
        tools = _only(allowed, tools, left_out, reading)
    if mode == "required" and not tools:
        why = f"only Google offers {', '.join(left_out)[:200]}" if left_out else "there are no `tools`"
        path = "toolConfig.functionCallingConfig.mode"
        refuse(f"`{path}` forces a call, but {why}.", path)
    return {"tools": tools} | ({"tool_choice": mode} if mode else {}) if tools else {}


def _tools(value: object, reading: Reading) -> tuple[Tools, list[str]]:
    """What can be called, and what is left out."""
    listed = [value] if isinstance(value, dict) else [] if value is None else value
    if not isinstance(listed, list):
        refuse(f"`tools` must be an array, not {kind(value)}.", "tools")
    tools: Tools = []
    left_out: list[str] = []
    for index, item in enumerate(listed):
        path = f"tools[{index}]"
        for name, entry in fields_at(item, path).items():
            if name == _DECLARATIONS:
                tools += _declarations(entry, f"{path}.{name}", reading)
            else:
                left_out.append(name)
                reading.remark("tools that only Google offers are left out", name)
    return tools, left_out


def _declarations(value: object, path: str, reading: Reading) -> Tools:
    if not isinstance(value, list):
        refuse(f"`{path}` must be an array, not {kind(value)}.", path)
    return [_tool(item, f"{path}[{index}]", reading) for index, item in enumerate(value)]


def _tool(value: object, path: str, reading: Reading) -> dict[str, Any]:
    fields = fields_at(value, path)
    for key in fields.keys() - _READ - _OF_ANSWER:
        reading.remark("keys of tools without effect", key)
    function = named_function(fields, path, reading)
    return {"type": "function", "function": function | {"parameters": _parameters(fields, path)}}


def _parameters(fields: dict[str, Any], path: str) -> dict[str, Any]:
    if "parameters" in fields and "parametersJsonSchema" in fields:
        refuse(f"`{path}` has both `parameters` and `parametersJsonSchema`. Send one.", f"{path}.parameters")
    if "parametersJsonSchema" in fields:
        path = f"{path}.parametersJsonSchema"
        schema = mapping_at(fields["parametersJsonSchema"], path)
    else:
        path = f"{path}.parameters"
        schema = json_schema(fields.get("parameters", {}), path)
    return object_schema(schema, path)


def _calling(value: dict[str, Any] | None, reading: Reading) -> tuple[str, list[str]]:
    """The mode in OpenAI's words, "" if none was said; and the names of the functions that may be called."""
    config = fields_at(value or {}, "toolConfig")
    for key in config.keys() - {"functionCallingConfig"}:
        reading.remark("no effect", f"toolConfig.{key}")
    path = "toolConfig.functionCallingConfig"
    calling = fields_at(config.get("functionCallingConfig", {}), path)
    for key in calling.keys() - {"mode", "allowedFunctionNames"}:
        reading.remark("no effect", f"{path}.{key}")
    said = calling.get("mode")
    if said is not None and (not isinstance(said, str) or said.upper() not in _MODES):
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(f"`{path}.mode` must be AUTO, ANY, NONE or VALIDATED; it is {shown}.", f"{path}.mode")
    if said is not None and said.upper() == "VALIDATED":
        reading.remark("served as AUTO", f"{path}.mode VALIDATED")
    names = calling.get("allowedFunctionNames", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(f"`{path}.allowedFunctionNames` must be an array of strings.", f"{path}.allowedFunctionNames")
    return ("" if said is None else _MODES[said.upper()]), names


def _only(allowed: list[str], tools: Tools, left_out: list[str], reading: Reading) -> Tools:
    """The model is told of no others: not every upstream knows how to be told that some may not be called."""
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name in allowed:
        if reading.tool_name(name) not in by_name:
            path = "toolConfig.functionCallingConfig.allowedFunctionNames"
            why = "only Google offers" if name in left_out else "is not among the `tools`"
            refuse(f"`{path}` names {name[:64]!r}, which {why}.", path)
    wanted = {reading.tool_name(name) for name in allowed}
    return [tool for name, tool in by_name.items() if name in wanted]
