"""Sets and removes lines of a `.env` file (`NAME=value`); comments and other lines stay as they are."""

from __future__ import annotations

import re
from typing import Any

from gateway.clients.document import DocumentError, KeyPath

_LINE = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*=\s*(?P<value>.*?)\s*$")
_BARE = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")
_COMMENT = re.compile(r"\s+#.*$")


class EnvDocument:
    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def plain(self) -> dict[str, Any]:
        found = (_LINE.match(line) for line in self._lines)
        return {match["name"]: unquoted(match["value"]) for match in found if match}

    def set(self, path: KeyPath, value: Any) -> None:
        (name,) = path
        line = f"{name}={quoted(str(value))}\n"
        places = self._places(name)
        if places:
            self._lines[places[-1]] = line
            return
        if self._lines and not self._lines[-1].endswith("\n"):
            self._lines[-1] += "\n"
        self._lines.append(line)

    def remove(self, path: KeyPath) -> None:
        (name,) = path
        gone = self._places(name)
        self._lines = [line for i, line in enumerate(self._lines) if i not in gone]

    def _places(self, name: str) -> list[int]:
        matches = ((i, _LINE.match(line)) for i, line in enumerate(self._lines))
        return [i for i, match in matches if match and match["name"] == name]


def quoted(value: str) -> str:
    """As the readers of such files take it: in quotes unless it is plain."""
    if "\n" in value or "\r" in value:
        raise DocumentError("a value of several lines can't stand in this file")
    if _BARE.fullmatch(value):
        return value
    if "'" not in value:
        return f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1]
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return _COMMENT.sub("", text)
