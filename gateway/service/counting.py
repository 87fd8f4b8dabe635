"""How many tokens a prompt has, without an answer: asked of the engine, or of an upstream that knows the question."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gateway.core.errors import NotFound
from gateway.core.types import CacheStrategy, ChatRequest
from gateway.dialects.base import ChatForm
from gateway.dialects.chat_form import parse_chat
from gateway.dialects.sampling import Defaults
from gateway.service.call import Call
from gateway.service.opening import read_whole, upstream_error
from gateway.upstreams.base import EventUpstream, PassThroughUpstream, RawRequest


@runtime_checkable
class CountsTokens(Protocol):
    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the rendered prompt. Raises like `stream` does."""


async def count_here(
    engine: EventUpstream, call: Call, strategy: CacheStrategy, form: ChatForm, defaults: Defaults
) -> int:
    if not isinstance(engine, CountsTokens):
        raise NotFound("This engine can't count tokens.")
    parsed = parse_chat(form.fields, defaults)
    request = ChatRequest(
        request_id=call.request_id,
        model="",
        prompt=parsed.prompt,
        sampling=parsed.sampling,
        strategy=strategy,
        stream=False,
    )
    return await engine.count_tokens(request)


async def count_elsewhere(upstream: PassThroughUpstream, request: RawRequest) -> bytes:
    response = await upstream.open(request)
    body = await read_whole(response)
    if response.status != 200:
        raise upstream_error(response, body)
    return body
