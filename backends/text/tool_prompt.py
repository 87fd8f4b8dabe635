"""What a model is told of tools when its chat template takes none. Pure.

The system message that is added, or the end of the first one there is:

    You can call these functions. Each line between <tools> and </tools> is one, with the JSON schema of its arguments.
    <tools>
    {"name":"f","description":"...","parameters":{...}}
    </tools>
    To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
    <tool_call>
    {"name":"...","arguments":{...}}
    </tool_call>

Where a call is forced, a grammar writes it without marks, and the model is told so:

    You can call these functions. Each line is one, with the JSON schema of its arguments.
    {"name":"f","description":"...","parameters":{...}}
    Answer with nothing but a call as JSON: {"name":"...","arguments":{...}}

and for several calls: "Answer with nothing but a JSON array of calls: [{"name":"...","arguments":{...}}]".
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from backends.protocol.messages import ChatPrompt

_MARKED = (
    "You can call these functions. Each line between <tools> and </tools> is one, "
    "with the JSON schema of its arguments.\n<tools>"
)
_HOW = (
    "</tools>\nTo call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{"name":"...","arguments":{...}}\n</tool_call>'
)
_INTRODUCTION = "You can call these functions. Each line is one, with the JSON schema of its arguments."
_ONE = 'Answer with nothing but a call as JSON: {"name":"...","arguments":{...}}'
_SEVERAL = 'Answer with nothing but a JSON array of calls: [{"name":"...","arguments":{...}}]'


def with_tool_prompt(prompt: ChatPrompt, *, role: str = "system") -> ChatPrompt:
    """The same prompt with its tools in words. `role` "user" is for templates that refuse system messages."""
    text = tool_prompt(prompt.tools or [], prompt.forced_calls)
    messages = list(prompt.messages)
    position = next((index for index, message in enumerate(messages) if message.get("role") == role), None)
    if position is None:
        messages.insert(0, {"role": role, "content": text})
    else:
        said = messages[position].get("content") or ""
        joined = f"{said}\n\n{text}" if role == "system" else f"{text}\n\n{said}"
        messages[position] = messages[position] | {"content": joined}
    return msgspec.structs.replace(prompt, messages=messages, tools=None)


def tool_prompt(tools: list[dict[str, Any]], forced_calls: int) -> str:
    """`forced_calls`: the most that the answer must consist of; 0 = the model decides."""
    lines = [_line(tool["function"]) for tool in tools]
    if not forced_calls:
        return "\n".join([_MARKED, *lines, _HOW])
    return "\n".join([_INTRODUCTION, *lines, _SEVERAL if forced_calls > 1 else _ONE])


def _line(function: dict[str, Any]) -> str:
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
