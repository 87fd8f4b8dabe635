"""A body of OpenAI's Responses becomes the chat form. Pure.

Fields that neither API knows go on as they are: they are for the server that generates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.dialects.base import ChatForm
from gateway.dialects.fields import Fields, check_turns, kind, refuse
from gateway.dialects.responses_echo import read_echo
from gateway.dialects.responses_items import History, read_items
from gateway.dialects.responses_messages import Messages, Source
from gateway.dialects.responses_text import read_text
from gateway.dialects.responses_tool_choice import tool_fields
from gateway.dialects.responses_tools import ToolTable, read_tools

MAX_TOP_LOGPROBS = 20
_LOGPROBS = "message.output_text.logprobs"
# Known, and without a counterpart in chat: they ask for what is not done here, or for what is done anyway.
_NO_COUNTERPART = (
    "stream", "stream_options", "store", "service_tier", "background", "client_metadata", "context_management",
    "previous_response_id", "image", "access_programs", "background_options", "moderation", "max_tool_calls",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "metadata",
)  # fmt: skip
# Fields of chat completions, which would change what is asked for behind this API's back.
_OF_CHAT = {
    "messages": "`input`", "max_tokens": "`max_output_tokens`", "max_completion_tokens": "`max_output_tokens`",
    "response_format": "`text.format`", "functions": "`tools`", "function_call": "`tool_choice`",
    "reasoning_effort": "`reasoning.effort`", "verbosity": "`text.verbosity`",
    "logprobs": f"`include` with {_LOGPROBS!r}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponsesContext:
    """What the answer needs of its request."""

    table: ToolTable
    echo: dict[str, Any]  # fields of the response object that say again what was asked
    items: list[Any]  # the whole input, earlier turns included
    sources: tuple[Source, ...] = ()  # of each chat message
    store: bool = True


def to_chat(values: Mapping[str, Any]) -> ChatForm:
    """Raises `InvalidRequest`, which names fields as this API does."""
    fields = Fields(values)
    _refuse_what_is_not_built(fields)
    items = _input(fields)
    table = read_tools(_given_tools(fields, items))
    messages = Messages(table)
    instructions = fields.string("instructions")
    if instructions:
        messages.system(instructions, "instructions")
    read_items(items, messages)
    text = read_text(fields)
    chat = {"model": fields.get("model"), "messages": messages.close()} | text.chat
    chat |= _sampling(fields) | tool_fields(table, fields.get("tool_choice"), _parallel(fields))
    reasoning, notices = _reasoning(fields)
    chat |= reasoning
    echo = read_echo(fields, table, text.echo)
    echo["previous_response_id"] = next((item.response_id for item in items if isinstance(item, History)), None)
    store = fields.boolean("store", True)
    remarks = _notices(fields)  # reads the last of the known fields: the rest is not this API's
    chat |= {name: values[name] for name in fields.unknown()}
    context = ResponsesContext(table, echo, flattened(items), tuple(messages.sources), store)
    kept = {name: value for name, value in chat.items() if value is not None}
    return ChatForm(kept, (*table.notices, *messages.notices, *notices, *remarks), context)


def _refuse_what_is_not_built(fields: Fields) -> None:
    fields.accept(_NO_COUNTERPART)
    for name, instead in _OF_CHAT.items():
        if fields.get(name) is not None:
            refuse(f"`{name}` is a field of chat completions; this API has {instead}.", name)
    if fields.get("background"):
        refuse("`background` is not supported: ask with `stream`, or wait for the answer.", "background")
    if fields.get("n") not in (None, 1):
        refuse("`n` must be 1: this API has one answer for each request.", "n")
    for name, instead in {
        "conversation": "`previous_response_id` or the whole history in `input`",
        "prompt": "`instructions` and `input`",
    }.items():
        if fields.get(name) is not None:
            refuse(f"`{name}` is kept by the vendor's own servers only. Send {instead}.", name)
    if fields.get("previous_response_id") is not None:
        refuse("`previous_response_id` is not kept here. Send the whole history in `input`.", "previous_response_id")


def _input(fields: Fields) -> list[Any]:
    value = fields.get("input")
    if value is None:
        refuse("`input` is required: a string, or an array with at least one item.", "input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        refuse(f"`input` must be a string or an array of items, not {kind(value)}.", "input")
    if not value:
        refuse("`input` is empty; at least one item is needed.", "input")
    check_turns(value, "input")
    return value


def flattened(items: list[Any]) -> list[Any]:
    """The items one by one, those of earlier turns first."""
    flat: list[Any] = []
    for item in items:
        if isinstance(item, History):
            flat += item
        else:
            flat.append(item)
    return flat


def _given_tools(fields: Fields, items: list[Any]) -> list[tuple[str, object]]:
    """Those of `tools`, then those that items add."""
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        refuse(f"`tools` must be an array, not {kind(tools)}.", "tools")
    given: list[tuple[str, object]] = [(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())]
    for index, item in enumerate(flattened(items)):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            added = item.get("tools")
            if not isinstance(added, list):
                refuse(f"`input[{index}].tools` must be an array, not {kind(added)}.", f"input[{index}].tools")
            given += [(f"input[{index}].tools[{position}]", tool) for position, tool in enumerate(added)]
    return given


def _parallel(fields: Fields) -> bool | None:
    return None if fields.get("parallel_tool_calls") is None else fields.boolean("parallel_tool_calls")


def _sampling(fields: Fields) -> dict[str, Any]:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    chat: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "max_tokens": fields.integer("max_output_tokens", 1),
        "user": fields.string("user"),
    }
    if _LOGPROBS in _include(fields) or top:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    return chat


def _include(fields: Fields) -> list[str]:
    value = fields.get("include")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse("`include` must be an array of strings.", "include")
    return value


def _reasoning(fields: Fields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Servers of models that don't reason ignore the effort."""
    value = fields.mapping("reasoning") or {}
    effort = value.get("effort")
    if effort is not None and not isinstance(effort, str):
        refuse(f"`reasoning.effort` must be a string, not {kind(effort)}.", "reasoning.effort")
    summary = value.get("summary") or value.get("generate_summary")
    notices = ("reasoning.summary has no effect: reasoning is given whole",) if summary else ()
    return ({"reasoning_effort": effort} if effort else {}), notices


def _notices(fields: Fields) -> tuple[str, ...]:
    truncation = fields.get("truncation")
    if truncation not in (None, "auto", "disabled"):
        refuse("`truncation` must be 'auto' or 'disabled'.", "truncation")
    notices = []
    if truncation == "auto":
        notices.append("truncation has no effect: nothing is cut, an input that is too long is refused")
    names = ("context_management", "moderation")
    notices += [f"{name} has no effect" for name in names if fields.get(name)]
    return tuple(notices)
