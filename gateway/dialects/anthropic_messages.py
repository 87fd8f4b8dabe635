"""Anthropic Messages: the dialect of Claude Code and Anthropic's SDKs, with the counting of tokens. Pure, no I/O.

For an upstream that speaks this API itself nothing here is used: bytes pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.dialects.anthropic_errors import error_body, error_status
from gateway.dialects.anthropic_events import MessagesRenderer
from gateway.dialects.anthropic_request import read_request
from gateway.dialects.base import ChatForm, Dialect
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.sampling import Defaults, ParsedBody

NAME = "anthropic_messages"
PATH = "/messages"

# Fields of the chat form -> what the client calls them. Every other name is the same in both.
_OUR_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
# What a prompt is made of. A count asks for no answer, so that nothing else is looked at.
_OF_PROMPT = (
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "continue_final_message",
    "chat_template_kwargs",
)  # fmt: skip


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """For the local engine. Raises `InvalidRequest`."""
    form = read_request(body, local=True)
    try:
        parsed = parse_chat(form.fields, defaults)
    except InvalidRequest as error:
        raise _in_our_words(error) from None
    return replace(parsed, notices=form.notices + parsed.notices, context=form.context)


def to_chat(body: Mapping[str, Any]) -> ChatForm:
    """For an upstream that speaks OpenAI's chat. Nothing of the prompt is left out."""
    return read_request(body, local=False)


def count_tokens_request(body: Mapping[str, Any]) -> ChatForm:
    """The same prompt that `parse` makes of the body: its length is what a request would be charged for."""
    form = read_request(body, local=True)
    return replace(form, fields={name: form.fields[name] for name in _OF_PROMPT if name in form.fields})


def _in_our_words(error: InvalidRequest) -> InvalidRequest:
    chat_name = (error.param or "").partition(".")[0].partition("[")[0]
    ours = _OUR_NAMES.get(chat_name)
    if ours is None:
        return error
    return InvalidRequest(error.message.replace(f"`{chat_name}", f"`{ours}"), param=ours)


DIALECT = Dialect(
    name=NAME,
    path=PATH,
    parse=parse,
    renderer=MessagesRenderer,
    error_body=error_body,
    to_chat=to_chat,
    error_status=error_status,
)
