"""Anthropic Messages: the dialect of Claude Code and Anthropic's SDKs, with the counting of tokens. Pure, no I/O.

For an upstream that speaks this API itself nothing here is used: bytes pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.anthropic_errors import error_body, error_status
from gateway.dialects.anthropic_events import MessagesRenderer
from gateway.dialects.anthropic_request import read_request
from gateway.dialects.base import ChatForm, Dialect
from gateway.dialects.chat_form import parse_form, prompt_of
from gateway.dialects.sampling import Defaults, ParsedBody

NAME = "anthropic_messages"
PATH = "/messages"

# Fields of the chat form -> what the client calls them. Every other name is the same in both.
_OUR_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """For the local engine. Raises `InvalidRequest`."""
    return parse_form(read_request(body, local=True), defaults, _OUR_NAMES)


def to_chat(body: Mapping[str, Any]) -> ChatForm:
    """For an upstream that speaks OpenAI's chat. Nothing of the prompt is left out."""
    return read_request(body, local=False)


def count_tokens_request(body: Mapping[str, Any]) -> ChatForm:
    """The same prompt that `parse` makes of the body: its length is what a request would be charged for."""
    return prompt_of(read_request(body, local=True))


DIALECT = Dialect(
    name=NAME,
    path=PATH,
    parse=parse,
    renderer=MessagesRenderer,
    error_body=error_body,
    to_chat=to_chat,
    error_status=error_status,
)
