"""OpenAI Responses: a body becomes the chat form, events become typed events or one response object. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.dialects.base import ChatForm, Dialect
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.fields import refuse
from gateway.dialects.responses_conversation import expand
from gateway.dialects.responses_errors import error_body, refuse_coded, restated
from gateway.dialects.responses_renderer import Renderer
from gateway.dialects.responses_request import ResponsesContext, to_chat
from gateway.dialects.sampling import Defaults, ParsedBody


def parse(values: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """For the local engine. Raises `InvalidRequest`, which names fields as this API does."""
    form = to_chat(values)
    context: ResponsesContext = form.context
    _refuse_media(form, context)
    try:
        parsed = parse_chat(form.fields, defaults)
    except InvalidRequest as error:
        raise restated(error, context.sources, context.table) from None
    return replace(parsed, notices=form.notices + parsed.notices, context=context)


def _refuse_media(form: ChatForm, context: ResponsesContext) -> None:
    """By the code and the field that make Codex take the image out of its history and go on."""
    for message, source in zip(form.fields["messages"], context.sources, strict=True):
        content = message["content"]
        for index, part in enumerate(content if isinstance(content, list) else ()):
            path = f"{source.path}.{source.key}[{index}]"
            if part["type"] == "image_url":
                refuse_coded(f"`{path}` is an image; this model takes only text.", f"{path}.image_url", "invalid_value")
            if part["type"] != "text":
                refuse(f"`{path}` is no text; this model takes only parts of type 'input_text'.", path)


DIALECT = Dialect("openai_responses", "/responses", parse, Renderer, error_body, to_chat=to_chat, expand=expand)
