"""The chat form for the local engine: OpenAI's chat completions fields, checked and read. Pure, no I/O.

Every chat dialect ends here: what its own API says otherwise, it translates before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from backends.protocol.messages import ChatPrompt
from gateway.core.errors import InvalidRequest
from gateway.dialects.base import ChatForm
from gateway.dialects.chat_messages import read_messages, read_tools
from gateway.dialects.fields import Fields, refuse
from gateway.dialects.grammar import grammar_notices, read_response_format, read_tool_choice
from gateway.dialects.sampling import (
    NO_EFFECT,
    Defaults,
    ParsedBody,
    read_cache_salt,
    read_include_usage,
    read_n,
    read_sampling,
    unknown_field_notices,
)

MAX_TOP_LOGPROBS = 20


def parse_chat(body: Mapping[str, Any], defaults: Defaults) -> ParsedBody:
    """Check every field by name. Raises `InvalidRequest`."""
    fields = Fields(body)
    fields.accept(NO_EFFECT)
    messages = read_messages(fields.get("messages"))
    use = read_tool_choice(fields, read_tools(fields.get("tools")))
    response_format = read_response_format(fields)
    _refuse_what_is_not_built(fields)
    sampling = msgspec.structs.replace(
        read_sampling(fields, _max_tokens(fields, defaults), defaults),
        n=read_n(fields),
        logprobs=_logprobs(fields),
        grammar=use.grammar or response_format,
    )
    include_usage, cache_salt = read_include_usage(fields), read_cache_salt(fields)
    prompt = ChatPrompt(
        messages=messages,
        tools=use.tools,
        template_kwargs=fields.mapping("chat_template_kwargs") or {},
        continue_final_message=fields.boolean("continue_final_message"),
        forced_calls=use.forced_calls,
    )
    notices = grammar_notices(sampling)
    if use.grammar is not None and response_format is not None:
        notices += ("response_format has no effect: a tool call is forced",)
    return ParsedBody(prompt, sampling, include_usage, cache_salt, notices + unknown_field_notices(fields))


def parse_form(form: ChatForm, defaults: Defaults, client_names: Mapping[str, str]) -> ParsedBody:
    """`parse_chat` of what a dialect has translated. A refusal names a field as the client does, by `client_names`."""
    try:
        parsed = parse_chat(form.fields, defaults)
    except InvalidRequest as error:
        raise _renamed(error, client_names) from None
    return replace(parsed, notices=form.notices + parsed.notices, context=form.context)


def _renamed(error: InvalidRequest, client_names: Mapping[str, str]) -> InvalidRequest:
    chat_name = (error.param or "").partition(".")[0].partition("[")[0]
    name = client_names.get(chat_name)
    if name is None:
        return error
    return InvalidRequest(error.message.replace(f"`{chat_name}", f"`{name}"), param=name)


# What a prompt is made of. A count asks for no answer, so that nothing else is looked at.
_OF_PROMPT = (
    "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "continue_final_message",
    "chat_template_kwargs",
)  # fmt: skip


def prompt_of(form: ChatForm) -> ChatForm:
    """The same prompt without what only its answer needs."""
    return replace(form, fields={name: form.fields[name] for name in _OF_PROMPT if name in form.fields})


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not wanted and top:
        refuse("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    return (top or 0) if wanted else None


def _max_tokens(fields: Fields, defaults: Defaults) -> int | None:
    """`max_completion_tokens` is the newer name and wins; both are checked."""
    newer, older = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    return next((value for value in (newer, older, defaults.max_tokens) if value is not None), None)


def _refuse_what_is_not_built(fields: Fields) -> None:
    fields.unsupported("prompt_logprobs", 0)
    fields.unsupported("echo", False)
    fields.unsupported("suffix", "")
    fields.unsupported("functions", [])
    fields.unsupported("function_call", "none", "auto")
    fields.unsupported("modalities", ["text"])
    fields.unsupported("audio")
