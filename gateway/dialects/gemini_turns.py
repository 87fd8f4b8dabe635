"""The contents and the system instruction of a Gemini request as OpenAI chat messages. Pure.

The same turns give the same messages in every later request, so that the prompt of one turn begins that of the next.
Consecutive contents of a role are one turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.dialects.chat_turns import BETWEEN_TEXTS, ChatPart, Message, content_of
from gateway.dialects.fields import check_turns, kind, refuse
from gateway.dialects.gemini_parts import Part, read_parts, told_as_text, user_part
from gateway.dialects.gemini_results import CallIds, tool_call, tool_result
from gateway.dialects.gemini_spelling import fields_at
from gateway.dialects.reading import Reading

ROLES = {"user": "user", "function": "user", "tool": "user", "model": "assistant"}
Turn = tuple[str, list[Part]]  # a role and its parts


def read_conversation(system: object, contents: object, reading: Reading) -> list[Message]:
    """Raises `InvalidRequest` with the path of what is wrong in the client's own body."""
    read, ids = _system(system, reading), CallIds()
    for role, parts in _turns(contents, reading):
        read += _user(parts, ids, reading) if role == "user" else [_assistant(parts, ids, reading)]
    return read


def _turns(value: object, reading: Reading) -> list[Turn]:
    contents = [value] if isinstance(value, dict) else value
    if not isinstance(contents, list):
        refuse(f"`contents` is required: an array with at least one content, not {kind(value)}.", "contents")
    check_turns(contents, "contents")
    turns: list[Turn] = []
    for index, content in enumerate(contents):
        role, parts = _content(content, f"contents[{index}]", reading)
        if not parts:
            reading.remark("contents without parts are left out")
        elif turns and turns[-1][0] == role:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    if not turns:
        refuse("`contents` needs at least one content that has parts.", "contents")
    return turns


def _content(value: object, path: str, reading: Reading) -> Turn:
    fields = fields_at(value, path)
    role = fields.get("role") or "user"
    if not isinstance(role, str) or role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        refuse(f"`{path}.role` must be 'user' or 'model'; it is {shown}.", f"{path}.role")
    parts = read_parts(fields.get("parts", []), f"{path}.parts", reading)
    if any(part.kind == "functionResponse" for part in parts):
        parts = [replace(part, returned=True) for part in parts]
    return ROLES[role], parts


# ------------------------------------------------------------------------------------------------------ one turn each


def _system(value: object, reading: Reading) -> list[Message]:
    """A content of any role, as the API has it; or the text alone."""
    if value is None:
        return []
    path, said = "systemInstruction", value
    if isinstance(value, dict):
        path, said = f"{path}.parts", fields_at(value, path).get("parts", [])
    texts = [_system_text(part) for part in read_parts(said, path, reading)]
    return [{"role": "system", "content": BETWEEN_TEXTS.join(texts)}] if texts else []


def _system_text(part: Part) -> str:
    if part.kind != "text":
        refuse(f"`{part.path}` must be text: a system instruction holds nothing else.", part.path)
    text: str = part.value
    return text


def _user(parts: list[Part], ids: CallIds, reading: Reading) -> list[Message]:
    """Results come first, each as a tool message: they must follow the calls at once."""
    results: list[Message] = []
    said: list[ChatPart] = []
    for part in parts:
        if part.kind == "functionCall" or part.thought:
            _refuse_misplaced(part, "user")
        if part.kind == "functionResponse":
            message, attached = tool_result(part, ids, reading)
            results.append(message)
            said += attached
        else:
            said.append(user_part(part, reading))
    return [*results, {"role": "user", "content": content_of(said)}] if said else results


def _assistant(parts: list[Part], ids: CallIds, reading: Reading) -> Message:
    """The model's own texts are joined as they were written: a client may send each piece of a stream as a part."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part.kind:
            case "text":
                (thoughts if part.thought else texts).append(part.value)
            case "functionCall":
                calls.append(tool_call(part, ids, reading))
            case "functionResponse" | "inlineData" | "fileData":
                _refuse_misplaced(part, "model")
            case _:
                texts.append(told_as_text(part, reading))
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _refuse_misplaced(part: Part, role: str) -> None:
    what = "a thought" if part.thought else f"`{part.kind}`"
    refuse(f"`{part.path}`: {what} can't stand in a content of the role '{role}'.", part.path)
