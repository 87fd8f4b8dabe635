"""Which endpoint a path means, however a client builds it: with or without /v1, /api, a mode prefix, spare slashes.

Pure. Nothing is ever redirected: a redirect loses the body of a POST.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MODES = ("merged", "split")
_PREFIXES = (("api", "v1"), ("v1", "v1"), ("api",), ("v1",), ())  # the longest first
_SLASHES = re.compile(r"/{2,}")


@dataclass(frozen=True, slots=True)
class Place:
    """An endpoint's name, the mode that the path chose, and the id at its end."""

    name: str
    mode: str | None = None
    tail: str = ""


ENDPOINTS = frozenset({"chat/completions", "completions", "models", "engines", "admin/reset_peaks"})
WITH_TAIL = ("models", "requests")  # models/ID, requests/ID; an id may hold slashes
AT_ROOT = frozenset({"health", "ready", "metrics"})


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
            if place is not None:
                return place
    return None


def _endpoint(parts: tuple[str, ...], mode: str | None) -> Place | None:
    name = "/".join(parts)
    if name in ENDPOINTS:
        return Place(name, mode)
    if len(parts) > 1 and parts[0] in WITH_TAIL:
        return Place(f"{parts[0]}/*", mode, "/".join(parts[1:]))
    return None
