"""A call made ready for an upstream elsewhere: its own bytes for one that speaks its API, or OpenAI's chat instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from multidict import CIMultiDict

from gateway.core.types import CacheStrategy, Route
from gateway.dialects.base import ChatForm
from gateway.service.body_rewrite import rewrite
from gateway.service.call import Call
from gateway.service.exchange import Exchange
from gateway.service.opening import PassThroughPlan
from gateway.settings.schema import RequestSettings, Settings
from gateway.strategy.resolve import BODY_FIELDS
from gateway.upstreams.base import RawRequest
from gateway.upstreams.http.headers import CREDENTIALS

CHAT_PATH = "/chat/completions"
CONTROL_FIELDS = frozenset(BODY_FIELDS)
_OUR_HEADERS = ("x-cache-mode", "x-request-id")  # sent on with values of our own
_ANTHROPIC_VERSION = "2023-06-01"  # for a client that forgot it; the API insists
# How each API names the most tokens of an answer; the first name is the one that is filled in.
_TOKEN_LIMITS = {
    "openai_chat": ("max_tokens", "max_completion_tokens"),
    "openai_completions": ("max_tokens",),
    "openai_responses": ("max_output_tokens",),
    "anthropic_messages": ("max_tokens",),
}
_USAGE_ON_REQUEST = ("openai_chat", "openai_completions")  # other APIs tell it unasked


def own_bytes_plan(exchange: Exchange, settings: Settings, strategy: CacheStrategy, route: Route) -> PassThroughPlan:
    """The client's bytes, changed only where they have to be."""
    call, body = exchange.call, exchange.call.body
    exchange.note(_not_forwarded(strategy))
    said = body.value("model")
    replace: dict[str, Any] = {} if said == route.upstream_model or not said else {"model": route.upstream_model}
    add = _fill_in(exchange, settings.request, route)
    remove = set(CONTROL_FIELDS | {name for name in add if name in body.fields})  # there, but saying nothing
    plain = _raw(exchange, settings, strategy, rewrite(body, remove=remove, replace=replace, add=add))
    options = body.value("stream_options")
    asked = isinstance(options, dict) and options.get("include_usage") is True
    unwanted = not exchange.stream or call.dialect.name not in _USAGE_ON_REQUEST
    if unwanted or asked or (options is not None and not isinstance(options, dict)):
        return PassThroughPlan(plain)
    with_usage = {**(options or {}), "include_usage": True}
    data = rewrite(body, remove=remove | {"stream_options"}, replace=replace, add=add | {"stream_options": with_usage})
    return PassThroughPlan(_raw(exchange, settings, strategy, data), without_usage=plain, strip_usage=True)


def translated_plan(
    exchange: Exchange, settings: Settings, strategy: CacheStrategy, route: Route, form: ChatForm
) -> PassThroughPlan:
    """The same request as OpenAI's chat."""
    exchange.note(_not_forwarded(strategy))
    fields = {name: value for name, value in form.fields.items() if name not in CONTROL_FIELDS}
    fields |= {"model": route.upstream_model, "stream": exchange.stream}
    if fields.get("temperature") is None and settings.request.temperature is not None:
        fields["temperature"] = settings.request.temperature
    limits = (fields.get("max_tokens"), fields.get("max_completion_tokens"))
    if limits == (None, None) and settings.request.max_tokens is not None:
        fields["max_tokens"] = settings.request.max_tokens
    headers = _headers(exchange.call, settings, strategy)
    data, resent = msgspec.json.encode(fields), exchange.count_resend
    plain = RawRequest(CHAT_PATH, data, headers, exchange.stream, strategy=strategy, on_resent=resent)
    num_choices = fields.get("n") or 1
    if not exchange.stream:
        return PassThroughPlan(plain, num_choices=num_choices)
    data = msgspec.json.encode(fields | {"stream_options": {"include_usage": True}})
    return PassThroughPlan(dataclasses.replace(plain, body=data), without_usage=plain, num_choices=num_choices)


def count_request(call: Call, settings: Settings, strategy: CacheStrategy, route: Route, path: str) -> RawRequest:
    """A question for a token count, for an upstream that knows it."""
    said = call.body.value("model")
    replace = {} if said == route.upstream_model or not said else {"model": route.upstream_model}
    add = {} if said else {"model": route.upstream_model}
    data = rewrite(call.body, remove=CONTROL_FIELDS, replace=replace, add=add)
    return RawRequest(path, data, _headers(call, settings, strategy), stream=False, key_header="x-api-key")


def _raw(exchange: Exchange, settings: Settings, strategy: CacheStrategy, data: bytes) -> RawRequest:
    dialect = exchange.call.dialect
    key_header = "x-api-key" if dialect.name == "anthropic_messages" else "Authorization"
    headers = _headers(exchange.call, settings, strategy)
    resent = exchange.count_resend
    return RawRequest(dialect.path, data, headers, exchange.stream, key_header, strategy, on_resent=resent)


def _fill_in(exchange: Exchange, defaults: RequestSettings, route: Route) -> dict[str, Any]:
    """What the settings say for what the request leaves out."""
    body, limits = exchange.call.body, _TOKEN_LIMITS[exchange.call.dialect.name]
    wanted: dict[str, Any] = {"model": route.upstream_model, "temperature": defaults.temperature}
    if all(body.value(name) is None for name in limits):
        wanted[limits[0]] = defaults.max_tokens
    if exchange.stream:
        wanted["stream"] = True
    return {name: value for name, value in wanted.items() if value is not None and body.value(name) in (None, "")}


def _headers(call: Call, settings: Settings, strategy: CacheStrategy) -> CIMultiDict[str]:
    """The client's headers; its key only if it isn't one of ours."""
    kept = CIMultiDict(call.headers)
    for name in (*_OUR_HEADERS, *(CREDENTIALS if settings.keys else ())):
        kept.popall(name, None)
    if call.dialect.name == "anthropic_messages":
        kept.setdefault("anthropic-version", _ANTHROPIC_VERSION)
    kept.update({"X-Cache-Mode": strategy.mode.value, "X-Request-Id": call.request_id})
    return kept


def _not_forwarded(strategy: CacheStrategy) -> tuple[str, ...]:
    neutral = CacheStrategy(strategy.mode, strategy.source)
    parts = ("chunk_size", "kv_cache_dtype", "transfer_mode")
    named = [part for part in parts if getattr(strategy, part) != getattr(neutral, part)]
    return (f"only the mode is forwarded to this upstream, not: {', '.join(named)}",) if named else ()
