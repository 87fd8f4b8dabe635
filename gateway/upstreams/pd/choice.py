"""What a pair's servers are chosen by: a request's prompt in the internal form, as far as it can be read. Pure."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from backends.protocol.messages import ChatPrompt, Prompt, SamplingParams, TextPrompt, TokenPrompt
from gateway.core.types import CacheMode, CacheStrategy, ChatRequest, StrategySource
from gateway.upstreams.pd.bodies import Fields, value

_DEFAULT = CacheStrategy(CacheMode.SPLIT, StrategySource.DEFAULT)


def choice_request(fields: Fields, request_id: str, strategy: CacheStrategy | None) -> ChatRequest:
    """A prompt that can't be read counts as empty: refusing it is the server's business."""
    model = value(fields, "model")
    return ChatRequest(
        request_id=request_id,
        model=model if isinstance(model, str) else "",
        prompt=_prompt(fields),
        sampling=SamplingParams(),
        strategy=strategy or _DEFAULT,
        stream=value(fields, "stream") is True,
    )


def _prompt(fields: Fields) -> Prompt:
    messages, tools = value(fields, "messages"), value(fields, "tools")
    if _are_dicts(messages):
        return ChatPrompt(messages=messages, tools=tools if _are_dicts(tools) and tools else None)
    prompt = value(fields, "prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return TokenPrompt(token_ids=prompt)
    return TextPrompt(text=prompt if isinstance(prompt, str) else "")


def _are_dicts(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def salted(fields: Fields, strategy: CacheStrategy | None) -> Fields:
    """The request kept apart in the servers' prefix caches, as far as its key or the client wants it apart."""
    if strategy is None:
        return fields
    asked = value(fields, "cache_salt")
    if not strategy.enable_prefix_cache:
        return {**fields, "cache_salt": uuid.uuid4().hex}
    if not strategy.cache_salt:
        return fields
    own = strategy.cache_salt
    salt = f"{len(own)}:{own}:{asked}" if isinstance(asked, str) and asked else own
    return {**fields, "cache_salt": salt}


def as_body(fields: Fields) -> bytes:
    return msgspec.json.encode(fields)
