"""The system prompt and messages of an Anthropic request as OpenAI chat messages. Pure.

The same turns give the same messages in every later request, so that the prompt of one turn begins that of the next:
nothing is numbered, trimmed or moved to the front. Consecutive messages of a role are one turn, as Anthropic has it.

A system message inside the conversation (Claude Code ends its first turn by one) is told in the user's turn: the chat
templates of many models refuse a second system message, or one that isn't the first.
"""

from __future__ import annotations

import re
from typing import Any

from gateway.dialects.anthropic_blocks import (
    Block,
    read_blocks,
    result_parts,
    told_as_text,
    user_parts,
)
from gateway.dialects.chat_turns import BETWEEN_TEXTS, ChatPart, Message, content_of
from gateway.dialects.fields import check_turns, kind, refuse
from gateway.dialects.object_arguments import arguments_text
from gateway.dialects.reading import Reading, filled_string_at, mapping_at, string_at

ROLES = ("user", "assistant", "system")
Turn = tuple[str, list[Block]]  # a role and its blocks

# Claude Code's first line of the system prompt, with a value that is new in each request: it says nothing to a model,
# and no later token of the prompt could be found in the prefix cache (anthropics/claude-code#68900).
_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")


def read_conversation(system: object, messages: object, reading: Reading) -> list[Message]:
    """Raises `InvalidRequest` with the path of what is wrong in the client's own body."""
    (_, leading), *turns = _turns(messages, reading)
    read = _system(read_blocks([] if system is None else system, "system") + leading, reading)
    for role, blocks in turns:
        read += _user(blocks, reading) if role == "user" else [_assistant(blocks, reading)]
    return read


def _turns(value: object, reading: Reading) -> list[Turn]:
    """The first is the system's, maybe an empty one; the others are the user's or the assistant's."""
    if not isinstance(value, list):
        refuse(f"`messages` is required: an array with at least one message, not {kind(value)}.", "messages")
    check_turns(value, "messages")
    turns: list[Turn] = [("system", [])]
    for index, message in enumerate(value):
        role, blocks = _message(message, f"messages[{index}]")
        if role == "system" and len(turns) > 1:
            role, blocks = "user", [_reminder(block) for block in blocks]
        if not blocks:
            reading.remark("messages without content are left out")
        elif turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    if len(turns) == 1:
        refuse("`messages` needs at least one message of the user or the assistant that has content.", "messages")
    return turns


def _message(value: object, path: str) -> Turn:
    message = mapping_at(value, path)
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        refuse(f"`{path}.role` must be one of {', '.join(ROLES)}; it is {shown}.", f"{path}.role")
    if "content" not in message:
        refuse(f"`{path}.content` is required: a string or an array of blocks.", f"{path}.content")
    return role, read_blocks(message["content"], f"{path}.content")


# ------------------------------------------------------------------------------------------------------ one turn each


def _reminder(block: Block) -> Block:
    """What the system says later on, in the words by which Claude Code marks it in a user's turn."""
    return block[0], {"type": "text", "text": f"<system-reminder>\n{_system_text(block)}\n</system-reminder>"}


def _system_text(block: Block) -> str:
    path, fields = block
    if fields["type"] != "text":
        refuse(f"`{path}.type` must be 'text' in a system prompt.", f"{path}.type")
    text: str = fields["text"]
    return text


def _system(blocks: list[Block], reading: Reading) -> list[Message]:
    texts: list[str] = []
    for text in map(_system_text, blocks):
        texts.append(_ATTRIBUTION.sub("", text, count=1) if reading.local and _ATTRIBUTION.match(text) else text)
    content = BETWEEN_TEXTS.join(text for text in texts if text)
    return [{"role": "system", "content": content}] if content else []


def _user(blocks: list[Block], reading: Reading) -> list[Message]:
    """Results come first, each as a tool message: they must follow the calls at once."""
    results: list[Message] = []
    parts: list[ChatPart] = []
    for block in blocks:
        _refuse_misplaced(block, "user", "tool_use", "thinking", "redacted_thinking")
        if block[1]["type"] == "tool_result":
            message, attached = _tool_result(block, reading)
            results.append(message)
            parts += attached
        else:
            parts += user_parts(block, reading)
    return [*results, {"role": "user", "content": content_of(parts)}] if parts else results


def _tool_result(block: Block, reading: Reading) -> tuple[Message, list[ChatPart]]:
    path, fields = block
    call_id = filled_string_at(fields, "tool_use_id", path)
    content = fields.get("content")
    texts, attached = [], []
    for inner in read_blocks([] if content is None else content, f"{path}.content"):
        text, parts = result_parts(inner, reading)
        texts.append(text)
        attached += parts
    if _is_error(fields, path):
        texts.insert(0, "[error]")
    return {"role": "tool", "tool_call_id": call_id, "content": BETWEEN_TEXTS.join(texts)}, attached


def _is_error(fields: dict[str, Any], path: str) -> bool:
    value = fields.get("is_error")
    if value is not None and not isinstance(value, bool):
        refuse(f"`{path}.is_error` must be true or false, not {kind(value)}.", f"{path}.is_error")
    return bool(value)


def _assistant(blocks: list[Block], reading: Reading) -> Message:
    """The model's own texts are joined as they were written, without anything between them."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        path, fields = block
        _refuse_misplaced(block, "assistant", "tool_result", "image", "document")
        match fields["type"]:
            case "text":
                texts.append(fields["text"])
            case "thinking":
                thoughts.append(string_at(fields, "thinking", path))
            case "redacted_thinking":
                reading.remark("only Anthropic's own models can read, left out", "redacted_thinking")
            case "tool_use":
                calls.append(_tool_call(fields, path, reading))
            case _:
                texts.append(told_as_text(block, reading))
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return message | ({"tool_calls": calls} if calls else {})


def _tool_call(fields: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    call_id, name = (filled_string_at(fields, key, path) for key in ("id", "name"))
    function = {"name": reading.tool_name(name), "arguments": arguments_text(fields.get("input"))}
    return {"id": call_id, "type": "function", "function": function}


def _refuse_misplaced(block: Block, role: str, *types: str) -> None:
    path, fields = block
    if fields["type"] in types:
        refuse(f"`{path}`: a block of type {fields['type']!r} can't stand in a message of the {role}.", path)
