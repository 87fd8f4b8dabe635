"""Chat messages, checked and reduced to what a chat template reads: text content, tool calls, names. Pure.

Text parts are joined without a separator, so that an array of parts and the joined string are the same prompt.
"""

from __future__ import annotations

from typing import Any

from gateway.dialects.fields import check_turns, kind, refuse

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEMPLATE_ROLE = {"developer": "system", "function": "tool"}  # the older or newer name of the same thing
_KEPT = ("name", "tool_call_id", "reasoning_content")


def read_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a chat request in the form that `ChatPrompt` holds."""
    if value is None:
        refuse("`messages` is required: an array with at least one message.", "messages")
    if not isinstance(value, list):
        refuse(f"`messages` must be an array, not {kind(value)}.", "messages")
    if not value:
        refuse("`messages` is empty; at least one message is needed.", "messages")
    check_turns(value, "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(f"`{path}` must be an object, not {kind(message)}.", path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        refuse(f"`{path}.role` must be one of {', '.join(ROLES)}; it is {shown}.", f"{path}.role")
    read: dict[str, Any] = {"role": _TEMPLATE_ROLE.get(role, role)}
    read["content"] = _content(message.get("content"), role, f"{path}.content")
    read.update({key: message[key] for key in _KEPT if isinstance(message.get(key), str)})
    calls = message.get("tool_calls")
    if calls is not None and role == "assistant":
        read |= _tool_calls(calls, f"{path}.tool_calls")
    return read


def _content(content: object, role: str, path: str) -> str | None:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return None
        refuse(f"`{path}` is missing or null; a {role} message needs text.", path)
    if not isinstance(content, list):
        refuse(f"`{path}` must be a string or an array of parts, not {kind(content)}.", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        refuse(f"`{path}` must be an object, not {kind(part)}.", path)
    part_type = part.get("type")
    key = {"text": "text", "refusal": "refusal"}.get(part_type) if isinstance(part_type, str) else None
    if key is None:
        shown = repr(part_type[:40]) if isinstance(part_type, str) else kind(part_type)
        refuse(f"unsupported content part {shown} at `{path}`: a text-only model takes parts of type 'text'.", path)
    text = part.get(key)
    if not isinstance(text, str):
        refuse(f"`{path}.{key}` must be a string, not {kind(text)}.", path)
    return text


def _tool_calls(calls: object, path: str) -> dict[str, Any]:
    if not isinstance(calls, list):
        refuse(f"`{path}` must be an array, not {kind(calls)}.", path)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"`{path}[{index}].function.name` must be a string.", f"{path}[{index}]")
    return {"tool_calls": calls} if calls else {}


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """The `tools` array, checked; None if there are none."""
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        refuse(f"`tools` must be an array, not {kind(value)}.", "tools")
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            refuse(f"`{path}.type` must be 'function'.", path)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            refuse(f"`{path}.function.name` must be a string that is not empty.", path)
    return value
