"""Sets and removes single values in JSON text; every other character, comments included, stays where it is."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway.clients.document import DocumentError, KeyPath, check_way
from gateway.core.commented_json import CommentedJsonError, Member, Node, parse_object, skip_blank

_STEP = "  "
_REST_OF_LINE = re.compile(r"[ \t]*(?://[^\n]*|/\*[^\n]*?\*/[ \t]*(?=\n))?")


class JsonDocument:
    """A JSON object as text."""

    def __init__(self, text: str) -> None:
        self._text = text if text.strip() else "{}\n"
        self._root = self._parsed()

    @property
    def text(self) -> str:
        return self._text

    def plain(self) -> dict[str, Any]:
        value = self._root.value
        assert isinstance(value, dict)
        return value

    def set(self, path: KeyPath, value: Any) -> None:
        check_way(self.plain(), path)
        node = self._root
        for depth, name in enumerate(path):
            member = node.find(name)
            if member is None:
                for outer in reversed(path[depth + 1 :]):
                    value = {outer: value}
                self._insert(node, name, value)
                return
            node = member.node
        self._replace(node.start, node.end, self._dumped(value, self._indent_at(node.start)))

    def remove(self, path: KeyPath) -> None:
        node = self._root
        for name in path[:-1]:
            member = node.find(name)
            if member is None:
                return
            node = member.node
        while (member := node.find(path[-1])) is not None:
            self._cut(node, member)
            node = self._again(path[:-1])

    def _again(self, path: KeyPath) -> Node:
        node = self._root
        for name in path:
            member = node.find(name)
            assert member is not None
            node = member.node
        return node

    def _insert(self, node: Node, name: str, value: Any) -> None:
        """As the last member, written as the members before it are."""
        inline = node.members and "\n" not in self._text[node.start : node.end]
        indent = self._indent_at(node.members[-1].start) if node.members else self._indent_at(node.start) + _STEP
        lead = " " if inline else f"\n{indent}"
        line = f"{lead}{json.dumps(name, ensure_ascii=False)}: {self._dumped(value, indent)}"
        if not node.members:
            # Comments of an empty object stay above what is now its only member.
            inside = self._text[node.start + 1 : node.end - 1].rstrip()
            self._replace(node.start + 1, node.end - 1, f"{inside}{line}\n{self._indent_at(node.start)}")
            return
        end = node.members[-1].node.end
        after = skip_blank(self._text, end)
        has_comma = self._text[after] == ","
        start = after + 1 if has_comma else end
        match = None if inline else _REST_OF_LINE.match(self._text, start)
        rest = match.group() if match else ""
        comma = "" if has_comma else ","
        self._replace(start, start + len(rest), f"{comma}{rest.rstrip()}{line}")

    def _cut(self, node: Node, member: Member) -> None:
        """The member, its comma, and its line if nothing else is on it."""
        after = skip_blank(self._text, member.node.end)
        has_comma = self._text[after] == ","
        start, end = member.start, after + 1 if has_comma else member.node.end
        earlier = [other for other in node.members if other.start < member.start]
        later = len(earlier) + 1 < len(node.members)
        text = self._text
        if earlier and not later and not has_comma:
            # The comma before it goes, since nothing follows any more.
            comma = skip_blank(text, earlier[-1].node.end)
            start, text = start - 1, text[:comma] + text[comma + 1 :]
            end -= 1
        line_start = text.rfind("\n", 0, start) + 1
        line_end = text.find("\n", end)
        alone = not text[line_start:start].strip() and line_end >= 0 and not text[end:line_end].strip()
        self._text = text[:line_start] + text[line_end + 1 :] if alone else text[:start].rstrip(" ") + text[end:]
        self._root = self._parsed()

    def _replace(self, start: int, end: int, new: str) -> None:
        self._text = self._text[:start] + new + self._text[end:]
        self._root = self._parsed()

    def _parsed(self) -> Node:
        try:
            return parse_object(self._text)
        except CommentedJsonError as error:
            raise DocumentError(f"line {error.line}: {error}") from None

    def _indent_at(self, position: int) -> str:
        line = self._text[self._text.rfind("\n", 0, position) + 1 : position]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _dumped(self, value: Any, indent: str) -> str:
        return json.dumps(value, ensure_ascii=False, indent=len(_STEP)).replace("\n", f"\n{indent}")
