"""README.md as data: its sections, tables and fenced blocks. Knows Markdown as far as README uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

_HEADING = re.compile(r"^#{1,4} (.+)$")
_CELL_BORDER = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"^```(\w*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the heading it stands under."""

    language: str
    text: str
    section: str
    line: int

    def __str__(self) -> str:
        return f"README.md, line {self.line}"


@cache
def lines() -> tuple[str, ...]:
    return tuple(README.read_text(encoding="utf-8").splitlines())


@cache
def blocks() -> tuple[Block, ...]:
    return tuple(_blocks())


def _blocks() -> Iterator[Block]:
    section, language, start, text = "", None, 0, []
    for number, line in enumerate(lines(), 1):
        fence = _FENCE.match(line)
        if language is None and fence:
            language, start, text = fence[1], number, []
        elif language is not None and line == "```":
            yield Block(language, "\n".join(text), section, start)
            language = None
        elif language is not None:
            text.append(line)
        elif heading := _HEADING.match(line):
            section = heading[1]
    assert language is None, f"the block that begins in line {start} has no end"


def blocks_in(*languages: str) -> list[Block]:
    return [block for block in blocks() if block.language in languages]


def section(title: str) -> list[str]:
    """The lines under a heading, up to the next one of any level."""
    found = [i for i, line in enumerate(lines()) if (heading := _HEADING.match(line)) and heading[1] == title]
    assert len(found) == 1, f"README needs exactly one heading {title!r}"
    rest = lines()[found[0] + 1 :]
    end = next((i for i, line in enumerate(rest) if _HEADING.match(line)), len(rest))
    return list(rest[:end])


def table(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head; code marks are left in."""
    rows = [line for line in section(title) if line.startswith("|")]
    assert len(rows) > 2, f"there is no table under {title!r}"
    return [_cells(row) for row in rows[2:]]


def _cells(row: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in _CELL_BORDER.split(row.strip().strip("|"))]


def code(cell: str) -> list[str]:
    """What a cell names in code marks."""
    return re.findall(r"`([^`]+)`", cell)


def prose() -> str:
    """Everything outside fenced blocks."""
    kept, inside = [], False
    for line in lines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)
