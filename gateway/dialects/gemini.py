"""Gemini's generateContent: the dialect of Gemini CLI and Google's SDKs, with the counting of tokens. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.dialects.base import ChatForm, Dialect
from gateway.dialects.chat_form import parse_form, prompt_of
from gateway.dialects.fields import refuse
from gateway.dialects.gemini_config import NAME as GENERATION_CONFIG
from gateway.dialects.gemini_errors import error_body
from gateway.dialects.gemini_events import ArrayRenderer, GenerateRenderer
from gateway.dialects.gemini_request import EXTENSIONS, read_request
from gateway.dialects.gemini_spelling import camel_keys
from gateway.dialects.sampling import Defaults, ParsedBody

NAME = "gemini"
PATH = "/models"

# Fields of the chat form -> what the client calls them. Every other name is the same in both.
_OUR_NAMES = {
    "stop": f"{GENERATION_CONFIG}.stopSequences",
    "n": f"{GENERATION_CONFIG}.candidateCount",
    "seed": f"{GENERATION_CONFIG}.seed",
    "max_tokens": f"{GENERATION_CONFIG}.maxOutputTokens",
    "response_format": f"{GENERATION_CONFIG}.responseSchema",
    "messages": "contents",
    "tool_choice": "toolConfig.functionCallingConfig",
}
_WRAPPED = "generateContentRequest"


def parse(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """For the local engine. Raises `InvalidRequest`."""
    return parse_form(read_request(body, local=True), defaults, _OUR_NAMES)


def to_chat(body: Mapping[str, Any]) -> ChatForm:
    """For an upstream that speaks OpenAI's chat. Nothing of the prompt is left out."""
    return read_request(body, local=False)


def count_tokens_request(body: Mapping[str, Any]) -> ChatForm:
    """The same prompt that `parse` makes of the body, or of the whole request that the body holds."""
    wrapped = camel_keys(body, keep=EXTENSIONS).get(_WRAPPED)
    if wrapped is not None:
        if not isinstance(wrapped, dict):
            refuse(f"`{_WRAPPED}` must be an object.", _WRAPPED)
        body = wrapped
    return prompt_of(read_request(body, local=True))


DIALECT = Dialect(
    name=NAME,
    path=PATH,
    parse=parse,
    renderer=GenerateRenderer,
    error_body=error_body,
    to_chat=to_chat,
    takes_comments=False,
)
# A stream without `alt=sse`: one JSON array, which grows.
ARRAY_DIALECT = replace(DIALECT, renderer=ArrayRenderer, stream_type="application/json")
