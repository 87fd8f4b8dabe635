"""Which endpoint a path means, however a client builds it: with or without /v1, /api, a mode prefix, spare slashes.

Pure. Nothing is ever redirected: a redirect loses the body of a POST.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from gateway.core.spelling import MODES as SPELLINGS

MODES = ("merged", "split")
GEMINI = "v1beta"  # the version in the paths of Google's clients
_PREFIXES = (("api", "v1"), ("v1", "v1"), (GEMINI,), ("api",), ("v1",), ())  # the longest first
_SLASHES = re.compile(r"/{2,}")


@dataclass(frozen=True, slots=True)
class Place:
    """An endpoint's name, the mode that the path chose, and the id at its end."""

    name: str
    mode: str | None = None
    tail: str = ""
    is_gemini: bool = False  # said by the path itself


ENDPOINTS = frozenset({
    "chat/completions", "completions", "responses", "messages", "messages/count_tokens", "models", "engines",
    "requests",
    "admin/reset_peaks", "embeddings", "responses/compact",
})  # fmt: skip
WITH_TAIL = ("models", "requests")  # models/ID, requests/ID; an id may hold slashes
# models/ID:VERB, as Google's clients have it; an id may hold colons too
VERBS = frozenset({"generateContent", "streamGenerateContent", "countTokens", "embedContent", "batchEmbedContents"})
AT_ROOT = frozenset({"health", "ready", "metrics"})


@lru_cache(maxsize=256)
def find(path: str) -> Place | None:
    """The endpoint of a decoded path; None if there is none."""
    parts = tuple(_SLASHES.sub("/", path).strip("/").split("/"))
    if parts == ("",):
        return Place("")
    if len(parts) == 1 and parts[0] in AT_ROOT:
        return Place(parts[0])
    mode = parts[0] if parts[0] in MODES else None
    rest = parts[1:] if mode else parts
    if mode and not rest:
        return Place("", mode)  # a client's probe of its base URL
    for prefix in _PREFIXES:
        if rest[: len(prefix)] == prefix:
            place = _endpoint(rest[len(prefix) :], mode)
            if prefix == (GEMINI,):
                return replace(place, is_gemini=True) if place and place.name.startswith("models") else None
            if place is not None:
                return place
    return None


def nothing_at(path: str) -> str:
    """What to say of a path without an endpoint."""
    is_mode = path.strip("/").partition("/")[0].lower() in SPELLINGS
    hint = " A path that chooses the mode begins with /merged or /split, in small letters." if is_mode else ""
    return f"There is nothing at {path[:200]!r}. The API is at /v1, such as /v1/chat/completions.{hint}"


def first_part(path: str) -> str:
    """What a decoded path begins with, behind its mode and its prefix, whether or not there is an endpoint."""
    parts = tuple(_SLASHES.sub("/", path).strip("/").split("/"))
    rest = parts[1:] if parts[0] in MODES else parts
    prefix = next(prefix for prefix in _PREFIXES if rest[: len(prefix)] == prefix)
    return next(iter(rest[len(prefix) :]), "")


def _endpoint(parts: tuple[str, ...], mode: str | None) -> Place | None:
    name = "/".join(parts)
    if name in ENDPOINTS:
        return Place(name, mode)
    if len(parts) > 1 and parts[0] in WITH_TAIL:
        tail = "/".join(parts[1:])
        model, _, verb = tail.rpartition(":")
        if model and parts[0] == "models" and verb in VERBS:
            return Place(f"models/*:{verb}", mode, model, is_gemini=True)
        return Place(f"{parts[0]}/*", mode, tail)
    return None
