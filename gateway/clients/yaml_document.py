"""Sets and removes entries in YAML text by cutting and inserting whole lines, so that comments and layout stay.

A path is a name, or a list's name and the `name` of one of its items: `("models", "kvgate")`. Deeper paths are not
needed by any client.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gateway.clients.document import DocumentError, KeyPath

_STEP = "  "
_DASH = re.compile(r"-(?:\s|#[^\n]*\n)*\Z")


class YamlDocument:
    def __init__(self, text: str) -> None:
        self._text = text
        self._root = self._parsed()

    @property
    def text(self) -> str:
        return self._text

    def plain(self) -> dict[str, Any]:
        """Lists of named items as mappings from those names, so that every entry has a path."""
        loaded = _read(lambda: YAML(typ="safe", pure=True).load(self._text)) or {}
        return {str(name): _by_name(value) for name, value in loaded.items()}

    def set(self, path: KeyPath, value: Any) -> None:
        if len(path) == 1:
            self.remove(path)
            self._append(f"{path[0]}: {_scalar(value)}\n")
            return
        name, item_name = path
        place = self._value(name)
        if place is None:
            self._append(f"{name}:\n{item_text(value, _STEP)}")
            return
        if isinstance(place, SequenceNode) and place.value:
            self._put_item(place, item_name, value)
            return
        if not isinstance(place, SequenceNode) and not _is_null(place):
            raise DocumentError(f"{name} holds something else than a list")
        start, end = place.start_mark.index, place.end_mark.index
        if start == end:  # nothing is written there, and its mark may be lines below
            start = end = self._behind_colon(name)
        self._replace(start, end, f"\n{item_text(value, _STEP)}".rstrip("\n"))

    def remove(self, path: KeyPath) -> None:
        place = self._value(path[0])
        if place is None:
            return
        if len(path) == 1:
            start = self._text.rfind("\n", 0, self._key(path[0]).start_mark.index) + 1
            self._replace(start, self._line_after(place), "")
            return
        item = _item_named(place, path[1])
        if item is None or not isinstance(place, SequenceNode):
            return
        if place.flow_style or len(place.value) == 1:
            self._remove_only_or_flow_item(place, item, path[0])
            return
        self._replace(self._line_start(item), self._line_after(item), "")

    def _put_item(self, place: SequenceNode, item_name: str, value: Any) -> None:
        if place.flow_style:
            self.remove_flow_item(place, item_name)
            again = self._value_at(place.start_mark.index)
            end = again.end_mark.index - 1
            self._replace(end, end, f"{', ' if again.value else ''}{json.dumps(value, ensure_ascii=False)}")
            return
        item = _item_named(place, item_name)
        dash = self._line_start(place.value[0])
        indent = self._text[dash : self._text.index("-", dash)]
        if item is not None:
            self._replace(self._line_start(item), self._line_after(item), item_text(value, indent))
            return
        end = self._line_after(place.value[-1])
        before = "" if self._text[:end].endswith("\n") else "\n"
        self._replace(end, end, before + item_text(value, indent))

    def _remove_only_or_flow_item(self, place: SequenceNode, item: Node, name: str) -> None:
        if place.flow_style:
            self.remove_flow_item(place, _name_of(item))
            return
        colon = self._behind_colon(name)
        gone = slice(self._line_start(item), self._line_after(item))
        # Both at once: a list without items is no list.
        self._replace(colon, gone.stop, f" []{self._text[colon : gone.start]}")

    def remove_flow_item(self, place: SequenceNode, item_name: str) -> None:
        items = place.value
        at = next((i for i, item in enumerate(items) if _name_of(item) == item_name), None)
        if at is None:
            return
        start = items[at - 1].end_mark.index if at else items[at].start_mark.index
        end = items[1].start_mark.index if at == 0 and len(items) > 1 else items[at].end_mark.index
        self._replace(start, end, "")

    def _value_at(self, position: int) -> SequenceNode:
        assert self._root is not None
        node = next(value for _, value in self._root.value if value.start_mark.index == position)
        assert isinstance(node, SequenceNode)
        return node

    def _behind_colon(self, name: str) -> int:
        return self._text.index(":", self._key(name).end_mark.index) + 1

    def _key(self, name: str) -> Node:
        assert self._root is not None
        key: Node = next(key for key, _ in self._root.value if key.value == name)
        return key

    def _value(self, name: str) -> Node | None:
        pairs = self._root.value if self._root is not None else ()
        return next((value for key, value in pairs if key.value == name), None)

    def _append(self, lines: str) -> None:
        before = "" if not self._text or self._text.endswith("\n") else "\n"
        self._replace(len(self._text), len(self._text), before + lines)

    def _line_start(self, item: Node) -> int:
        """Of the line with the item's dash, which may be lines above the item."""
        dash = _DASH.search(self._text[: item.start_mark.index])
        return self._text.rfind("\n", 0, dash.start() if dash else item.start_mark.index) + 1

    def _line_after(self, node: Node) -> int:
        """Behind the line on which the node really ends: its own mark lies behind comments and blank lines."""
        end = len(self._text[: _end_of(node)].rstrip())
        newline = self._text.find("\n", end)
        return len(self._text) if newline < 0 else newline + 1

    def _replace(self, start: int, end: int, new: str) -> None:
        self._text = self._text[:start] + new + self._text[end:]
        self._root = self._parsed()

    def _parsed(self) -> MappingNode | None:
        root = _read(lambda: YAML(typ="rt", pure=True).compose(self._text))
        if root is not None and (not isinstance(root, MappingNode) or root.flow_style):
            raise DocumentError("line 1: the file must hold a table of settings, one on a line")
        return root


def item_text(item: dict[str, Any], indent: str) -> str:
    """A list item, one line a value; JSON's strings and numbers are YAML's as well."""
    lines = _mapping_lines(item, f"{indent}  ")
    lines[0] = f"{indent}- {lines[0].lstrip()}"
    return "".join(f"{line}\n" for line in lines)


def _mapping_lines(mapping: dict[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_mapping_lines(value, f"{indent}{_STEP}")]
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read(work: Any) -> Any:
    try:
        return work()
    except MarkedYAMLError as error:
        mark = error.problem_mark
        raise DocumentError(f"{f'line {mark.line + 1}: ' if mark else ''}this is no YAML of one document") from None
    except (YAMLError, ValueError):
        raise DocumentError("this is no YAML") from None


def _by_name(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return value
    return {str(item.get("name", i)): item for i, item in enumerate(value)}


def _item_named(place: Node, name: str) -> Node | None:
    items = place.value if isinstance(place, SequenceNode) else ()
    return next((item for item in items if _name_of(item) == name), None)


def _name_of(item: Node) -> str:
    pairs = item.value if isinstance(item, MappingNode) else ()
    return next((str(value.value) for key, value in pairs if key.value == "name"), "")


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and str(node.tag).endswith(":null")


def _end_of(node: Node) -> int:
    """End of its last part: block collections themselves are marked as ending at the next token."""
    if isinstance(node, MappingNode) and node.value and not node.flow_style:
        return _end_of(node.value[-1][1])
    if isinstance(node, SequenceNode) and node.value and not node.flow_style:
        return _end_of(node.value[-1])
    return int(node.end_mark.index)
