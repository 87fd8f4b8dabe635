"""What answers are held to: `response_format` and forced tool calls, read into a `GrammarSpec`. Pure.

Schemas are compiled by the engine; here only their shape and size are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from backends.protocol.messages import GrammarSpec, SamplingParams, Tool
from gateway.dialects.fields import Fields, kind, refuse
from gateway.dialects.tool_function import check_tool_name

MAX_SCHEMA_BYTES = 64 * 1024
MAX_PARALLEL_CALLS = 8


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model is told of; and, if calls are forced, their grammar."""

    tools: list[dict[str, Any]] | None
    grammar: GrammarSpec | None = None

    @property
    def forced_calls(self) -> int:
        return self.grammar.max_calls if self.grammar is not None else 0


def read_response_format(fields: Fields) -> GrammarSpec | None:
    value = fields.mapping("response_format")
    said = None if value is None else value.get("type")
    if value is None or said == "text":
        return None
    if said == "json_object":
        return GrammarSpec(kind="json_object")
    if said != "json_schema":
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(
            f"`response_format.type` must be 'text', 'json_object' or 'json_schema'; it is {shown}.", "response_format"
        )
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, dict):
        refuse(f"`response_format.json_schema` must be an object, not {kind(wrapper)}.", "response_format")
    schema = wrapper.get("schema")
    if not isinstance(schema, dict):
        refuse(f"`response_format.json_schema.schema` must be an object, not {kind(schema)}.", "response_format")
    text = _text(schema)
    _check_size(len(text.encode()), "response_format")
    return GrammarSpec(kind="json_schema", schema=text)


def read_tool_choice(fields: Fields, tools: list[dict[str, Any]] | None) -> ToolUse:
    """Several calls at once are forced only by 'required', unless `parallel_tool_calls` is false."""
    choice = fields.get("tool_choice")
    parallel = fields.boolean("parallel_tool_calls", True)
    if choice in (None, "auto", "none"):
        return ToolUse(None if choice == "none" else tools)
    if choice != "required" and not isinstance(choice, dict):
        refuse(
            f"`tool_choice` must be 'none', 'auto', 'required' or name a function, not {kind(choice)}.", "tool_choice"
        )
    if tools is None:
        refuse("`tool_choice` forces a call, but there are no `tools`.", "tool_choice")
    max_calls = MAX_PARALLEL_CALLS if parallel else 1
    if choice == "required":
        return _forced(tools, max_calls)
    if choice.get("type") == "allowed_tools":
        allowed, required = _allowed(choice, tools)
        return _forced(allowed, max_calls) if required else ToolUse(allowed)
    return _forced([_named(choice, tools)], 1)


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The subset of tools that may be called, and whether one must be. The model is told of no others."""
    wrapper = choice.get("allowed_tools", choice)
    mode = wrapper.get("mode", "auto") if isinstance(wrapper, dict) else None
    if mode not in ("auto", "required"):
        refuse("`tool_choice.allowed_tools.mode` must be 'auto' or 'required'.", "tool_choice")
    listed = wrapper.get("tools")
    if not isinstance(listed, list) or not listed:
        refuse("`tool_choice.allowed_tools.tools` must be an array that names at least one function.", "tool_choice")
    allowed = [_named(entry, tools) for entry in listed]
    return [tool for tool in tools if tool in allowed], mode == "required"


def _named(choice: object, tools: list[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse("`tool_choice` must be of type 'function' with a `function.name`.", "tool_choice")
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        refuse(f"`tool_choice` names {name[:64]!r}, which is not among the `tools`.", "tool_choice")
    return named[0]


def _forced(tools: list[dict[str, Any]], max_calls: int) -> ToolUse:
    callable_tools = tuple(_tool(tool["function"], index) for index, tool in enumerate(tools))
    _check_size(sum(len(tool.parameters.encode()) for tool in callable_tools), "tools")
    return ToolUse(tools, GrammarSpec(kind="tool_calls", tools=callable_tools, max_calls=max_calls))


def _tool(function: dict[str, Any], index: int) -> Tool:
    path = f"tools[{index}].function"
    check_tool_name(function["name"], path, path)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        refuse(f"`{path}.parameters` must be an object, not {kind(parameters)}.", path)
    if parameters.get("type", "object") != "object":
        refuse(f"`{path}.parameters.type` must be 'object'.", path)
    return Tool(function["name"], _text(parameters))


def _text(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()


def _check_size(num_bytes: int, param: str) -> None:
    if num_bytes > MAX_SCHEMA_BYTES:
        refuse(f"The JSON schema of `{param}` has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed.", param)


def grammar_notices(sampling: SamplingParams) -> tuple[str, ...]:
    """What a grammar makes void: it alone says where an answer ends."""
    if sampling.grammar is None:
        return ()
    void = {"stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids, "ignore_eos": sampling.ignore_eos}
    names = ", ".join(name for name, value in void.items() if value)
    return (f"no effect on an answer that a grammar ends: {names}",) if names else ()
