"""Which client API a request speaks: by its place, and where there is none by what only one API's clients send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.core.errors import InvalidRequest
from gateway.dialects import anthropic_messages, gemini, openai_chat, openai_completions, openai_responses
from gateway.dialects.base import ChatForm, Dialect
from gateway.web.paths import GEMINI, Place, find, first_part

OF_PLACE: dict[str, Dialect] = {
    "chat/completions": openai_chat.DIALECT,
    "completions": openai_completions.DIALECT,
    "responses": openai_responses.DIALECT,
    "responses/compact": openai_responses.DIALECT,
    "messages": anthropic_messages.DIALECT,
    "messages/count_tokens": anthropic_messages.DIALECT,
    "models/*:generateContent": gemini.DIALECT,
    "models/*:streamGenerateContent": gemini.DIALECT,
    "models/*:countTokens": gemini.DIALECT,
}


@dataclass(frozen=True, slots=True)
class Counting:
    """How an API asks for the length of a prompt, and where its answer has it."""

    form: Callable[[Mapping[str, Any]], ChatForm]
    answer_field: str
    upstream_path: str = ""  # at an upstream that speaks that API


COUNTING = {
    "messages/count_tokens": Counting(
        anthropic_messages.count_tokens_request, "input_tokens", "/messages/count_tokens"
    ),
    "models/*:countTokens": Counting(gemini.count_tokens_request, "totalTokens"),
}


_ONLY_ANTHROPIC = frozenset({"messages", "complete", "organizations"})  # first parts of paths that no other API has


def speaks_anthropic(request: web.Request) -> bool:
    """Every client of that API names its version; who tries it by hand may not, and is known by the path."""
    return "anthropic-version" in request.headers or first_part(request.path) in _ONLY_ANTHROPIC


def speaks_gemini(request: web.Request, place: Place | None) -> bool:
    """By the path, or by how Google's clients send their key and say who they are."""
    if place.is_gemini if place is not None else f"/{GEMINI}/" in request.path:
        return True
    return "x-goog-api-key" in request.headers or "x-goog-api-client" in request.headers


def dialect_of(request: web.Request) -> Dialect:
    """In whose shape an error is told."""
    place = find(request.path)
    if place is not None and place.name in OF_PLACE:
        return OF_PLACE[place.name]
    if speaks_gemini(request, place):
        return gemini.DIALECT
    return anthropic_messages.DIALECT if speaks_anthropic(request) else openai_chat.DIALECT


def dialect_for(request: web.Request, place: Place) -> Dialect:
    """In whose shape a request is answered: Gemini's API has two kinds of stream, chosen by the query."""
    if place.name != "models/*:streamGenerateContent":
        return OF_PLACE[place.name]
    kind = request.query.get("alt", "json")
    if kind not in ("sse", "json"):
        raise InvalidRequest(f"Query alt must be sse or json; it is {kind[:40]!r}.", param="alt")
    return gemini.DIALECT if kind == "sse" else gemini.ARRAY_DIALECT


def fields_of_path(place: Place) -> dict[str, Any]:
    """What Gemini's API says in the path, where others say it in the body."""
    if not place.name.startswith("models/*:"):
        return {}
    return {"model": place.tail, "stream": place.name == "models/*:streamGenerateContent"}
