"""A Gemini generateContent body as the chat form. Pure.

`model` and `stream` stand in that API's path; whoever read it puts them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.base import ChatForm
from gateway.dialects.chat_turns import is_prefill
from gateway.dialects.fields import Fields, refuse
from gateway.dialects.gemini_answer import GenerateContext
from gateway.dialects.gemini_config import NAME as GENERATION_CONFIG
from gateway.dialects.gemini_config import GenerationConfig
from gateway.dialects.gemini_spelling import camel_keys
from gateway.dialects.gemini_tools import read_tools
from gateway.dialects.gemini_turns import read_conversation
from gateway.dialects.reading import Reading
from gateway.dialects.sampling import unknown_field_notices

# Known, and said to have no effect; then what was never meant to change an answer.
_NO_EFFECT = ("safetySettings", "modelArmorConfig")
_SILENT = ("stream", "labels", "store", "serviceTier")

# Fields of the chat form that are not Google's: a client that sends them (`extra_body`) means them.
EXTENSIONS = (
    "min_p", "min_tokens", "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "cache_salt",
    "chat_template_kwargs",
)  # fmt: skip


def read_request(body: Mapping[str, Any], *, local: bool) -> ChatForm:
    """Raises `InvalidRequest` with the client's own names of fields."""
    fields, reading = Fields(camel_keys(body, keep=EXTENSIONS)), Reading(local)
    fields.accept(_SILENT)
    for name in _NO_EFFECT:
        if fields.get(name):
            reading.remark("no effect", name)
    if fields.get("cachedContent"):
        refuse("`cachedContent` is kept by Google and not known here. Send the contents themselves.", "cachedContent")
    config = GenerationConfig(fields.mapping(GENERATION_CONFIG) or {}, reading)
    chat: dict[str, Any] = {}
    if model := fields.string("model"):
        chat["model"] = model
    chat["messages"] = read_conversation(fields.get("systemInstruction"), fields.get("contents"), reading)
    if is_prefill(chat["messages"]):
        # vLLM and SGLang ask for both; an upstream that knows neither says so.
        chat |= {"continue_final_message": True} | ({} if local else {"add_generation_prompt": False})
    chat |= read_tools(fields, reading) | config.chat_fields()
    chat |= _extensions(fields, chat.get("chat_template_kwargs"))
    for name in config.unknown():
        reading.remark("no effect", name)
    notices = reading.notices + unknown_field_notices(fields)
    return ChatForm(chat, notices, GenerateContext(reading.restored_names, config.include_thoughts))


def _extensions(fields: Fields, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a client says of the template itself wins over what was made of its other fields."""
    said = {name: value for name in EXTENSIONS if (value := fields.get(name)) is not None}
    own = said.get("chat_template_kwargs")
    if template_kwargs is not None and isinstance(own, dict):
        said["chat_template_kwargs"] = {**template_kwargs, **own}
    return said
