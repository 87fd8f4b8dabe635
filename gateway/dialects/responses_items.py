"""The input items of OpenAI's Responses, each read into chat messages, or refused by its path, or left out and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from gateway.dialects.fields import kind, refuse
from gateway.dialects.responses_content import chat_content, text_of
from gateway.dialects.responses_messages import Messages
from gateway.dialects.responses_tools import CUSTOM_ARGUMENT

_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM_ROLES)
# Calls of tools that clients run themselves. They are told as calls of a function of that name.
_CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
_OUTPUTS = {
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "tool_search_output": "tools",
}
# What the vendor's servers did by themselves. Nothing of it can be told to another model.
_LEFT_OUT = (
    "web_search_call", "file_search_call", "computer_call", "computer_call_output", "image_generation_call",
    "code_interpreter_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "program", "program_output", "additional_tools", "configuration_update",
)  # fmt: skip
_UNREADABLE = ("compaction", "compaction_summary", "context_compaction", "compaction_trigger")

_encode = msgspec.json.Encoder().encode


class History(list[Any]):
    """Items of earlier turns, which `previous_response_id` named, in one place of the input. No client can send it."""

    def __init__(self, response_id: str = "", items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self.response_id = response_id


def read_items(items: Sequence[object], messages: Messages) -> None:
    """Items of earlier turns come first, as one that holds them, so that paths are those of the client's own list."""
    offset = 0
    for index, item in enumerate(items):
        if isinstance(item, History):
            offset += 1
            for position, earlier in enumerate(item):
                _read_item(messages, earlier, f"previous_response_id:input[{position}]")
        else:
            _read_item(messages, item, f"input[{index - offset}]")
    if messages.left_out:
        kinds = ", ".join(dict.fromkeys(messages.left_out))
        messages.note(f"items left out, which only the vendor's own servers understand: {kinds}")


def _read_item(messages: Messages, item: object, path: str) -> None:
    if not isinstance(item, dict):
        refuse(f"`{path}` must be an object, not {kind(item)}.", path)
    said = item.get("type")
    if said is None and "role" in item:
        said = "message"
    reader = _READERS.get(said) if isinstance(said, str) else None
    if reader is None:
        shown = repr(said[:40]) if isinstance(said, str) else kind(said)
        refuse(f"`{path}.type` is {shown}, which is no known kind of item.", f"{path}.type")
    reader(messages, item, path)


def _message(messages: Messages, item: dict[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        refuse(f"`{path}.role` must be one of {', '.join(_ROLES)}; it is {shown}.", f"{path}.role")
    content = item.get("content")
    if role in _SYSTEM_ROLES:
        messages.system(text_of(content, f"{path}.content"), path)
    elif role == "assistant":
        text = "" if content is None else text_of(content, f"{path}.content")
        message = messages.assistant(path)
        message["content"] = (message["content"] or "") + text
    else:
        messages.user(chat_content(content, f"{path}.content"), path)


def _reasoning(messages: Messages, item: dict[str, Any], path: str) -> None:
    """The reasoning itself if it's there, else its summary. What is encrypted only its author can read."""
    content, summary = item.get("content") or [], item.get("summary") or []
    text = text_of(content, f"{path}.content") or text_of(summary, f"{path}.summary")
    if not text:
        if item.get("encrypted_content"):
            messages.note("encrypted reasoning left out, which only the server that wrote it can read")
        return
    message = messages.assistant(path)
    message["reasoning_content"] = message.get("reasoning_content", "") + text


def _function_call(messages: Messages, item: dict[str, Any], path: str) -> None:
    name, namespace = _name(item, path), item.get("namespace")
    flat = messages.table.flat(name, namespace if isinstance(namespace, str) and namespace else None)
    messages.call(flat, _arguments(messages, item.get("arguments")), item, path)


def _arguments(messages: Messages, value: object) -> str:
    """Always a JSON object: chat templates and servers read it, and what they can't read ends every later turn."""
    if isinstance(value, dict):
        return _encode(value).decode()
    text = value.strip() if isinstance(value, str) else ""
    if text in ("", "null"):
        return "{}"
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return value if isinstance(value, str) else text
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    messages.note("arguments of earlier calls that are no JSON object are given as its `_raw`")
    return _encode({"_raw": value}).decode()


def _custom_call(messages: Messages, item: dict[str, Any], path: str) -> None:
    name, namespace, text = _name(item, path), item.get("namespace"), item.get("input")
    if text is not None and not isinstance(text, str):
        refuse(f"`{path}.input` must be a string, not {kind(text)}.", f"{path}.input")
    flat = messages.table.flat(name, namespace if isinstance(namespace, str) and namespace else None)
    messages.call(flat, _encode({CUSTOM_ARGUMENT: text or ""}).decode(), item, path)


def _client_call(messages: Messages, item: dict[str, Any], path: str) -> None:
    name, key = _CLIENT_CALLS[item["type"]]
    value = item.get(key)
    messages.call(name, _encode(value if isinstance(value, dict) else {key: value}).decode(), item, path)


def _output(messages: Messages, item: dict[str, Any], path: str) -> None:
    key = _OUTPUTS[item["type"]]
    value = item.get(key)
    if item["type"] in ("function_call_output", "custom_tool_call_output"):
        if value is None:
            refuse(f"`{path}.{key}` is missing or null; the result of a call is a string or parts.", f"{path}.{key}")
        messages.result(_result(value, f"{path}.{key}"), item, path)
    else:
        messages.result(value if isinstance(value, str) else _encode(value).decode(), item, path)


def _result(value: object, path: str) -> str | list[dict[str, Any]]:
    """Text is one string, which is all that most servers take from a tool."""
    content = chat_content(value, path)
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "".join(part["text"] for part in content)


def _leave_out(messages: Messages, item: dict[str, Any], path: str) -> None:
    if item["type"] != "additional_tools":  # those were read before, as tools
        messages.left_out.append(item["type"])


def _refuse_unreadable(messages: Messages, item: dict[str, Any], path: str) -> None:
    refuse(f"`{path}` is a {item['type']}, which only the server that made it can read.", path)


def _refuse_reference(messages: Messages, item: dict[str, Any], path: str) -> None:
    refuse(f"`{path}` refers to an item that is not kept here. Send the item itself.", path)


def _name(item: dict[str, Any], path: str) -> str:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"`{path}.name` must be a string that is not empty.", f"{path}.name")
    return name


_READERS: dict[str, Callable[[Messages, dict[str, Any], str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "item_reference": _refuse_reference,
    **dict.fromkeys(_CLIENT_CALLS, _client_call),
    **dict.fromkeys(_OUTPUTS, _output),
    **dict.fromkeys(_LEFT_OUT, _leave_out),
    **dict.fromkeys(_UNREADABLE, _refuse_unreadable),
}
