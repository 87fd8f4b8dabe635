"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, but not as it could
    PROBLEM = "problem"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    why: str = ""
    what_to_do: str = ""


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warning(what: str, why: str = "", what_to_do: str = "") -> Finding:
    return Finding(Level.WARNING, what, why, what_to_do)


def problem(what: str, why: str = "", what_to_do: str = "") -> Finding:
    return Finding(Level.PROBLEM, what, why, what_to_do)
