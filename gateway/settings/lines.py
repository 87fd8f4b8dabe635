"""On which line each key of a TOML text stands. The text is known to be valid; knows no settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.settings.entries import Path

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n', re.S
)
_PART = re.compile(r"""\s*(?:"((?:\\.|[^"\\])*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(\.|$)""")


def key_lines(text: str) -> dict[Path, int]:
    """Line of each key and each table header. Members of inline tables have the line of their key."""
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, statement in _statements(text):
        if statement.startswith("[["):
            name = _parts(statement.strip("[]"))
            table = (*name, counts.get(name, 0))
            counts[name] = counts.get(name, 0) + 1
            lines.setdefault(name, number)
            lines[table] = number
        elif statement.startswith("["):
            table = _parts(statement.strip("[]"))
            lines.setdefault(table, number)
        elif statement:
            lines[table + _parts(statement)] = number
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header, or the part of a key before `=`, with its line. A value that runs over lines is one statement."""
    line = start = 1
    depth = begin = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        at_line_start = not text[begin : match.start()].strip()
        if token == "\n" and depth == 0:
            yield start, _key_part(text[begin : match.start()])
            begin, start = match.end(), line + 1
        elif token in "[{" and not at_line_start:
            depth += 1
        elif token in "]}" and depth > 0:
            depth -= 1
        line += token.count("\n")
    yield start, _key_part(text[begin:])


def _key_part(statement: str) -> str:
    statement = statement.strip()
    if statement.startswith("#"):
        return ""
    if statement.startswith("["):
        return statement.split("#", 1)[0].strip()
    match = re.match(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^=])*""", statement)
    return match.group().strip() if match else ""


def _parts(dotted: str) -> tuple[str, ...]:
    parts: list[str] = []
    position = 0
    while match := _PART.match(dotted, position):
        parts.append(match[1] or match[2] or match[3] or "")
        position = match.end()
        if match[4] != ".":
            break
    return tuple(parts)
