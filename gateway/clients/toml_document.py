"""Sets and removes single values in TOML text, by tomlkit, which keeps comments, order and blanks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable

from gateway.clients.document import DocumentError, KeyPath, check_way

# What tomlkit raises of layouts that it can read but not change.
_UNEDITABLE = (TOMLKitError, ValueError, TypeError, AttributeError, KeyError)


class TomlDocument:
    def __init__(self, text: str) -> None:
        try:
            self._document = tomlkit.parse(text)
        except TOMLKitError as error:
            place = f"line {error.line}: " if hasattr(error, "line") else ""  # its words may quote a key
            raise DocumentError(f"{place}this is no TOML") from None

    @property
    def text(self) -> str:
        return tomlkit.dumps(self._document)

    def plain(self) -> dict[str, Any]:
        plain = self._document.unwrap()
        assert isinstance(plain, dict)
        return plain

    def set(self, path: KeyPath, value: Any) -> None:
        check_way(self.plain(), path)
        try:
            table = self._table(path[:-1])
            if isinstance(value, dict):
                value = _filled(tomlkit.inline_table(), value)
            table[path[-1]] = value
        except _UNEDITABLE:
            raise DocumentError(f"the place of {'.'.join(path)} is written in a way that can't be edited") from None

    def remove(self, path: KeyPath) -> None:
        table: Any = self._document
        for name in path[:-1]:
            if not isinstance(table, Mapping) or name not in table:
                return
            table = table[name]
        if not isinstance(table, Mapping) or path[-1] not in table:
            return
        try:
            del table[path[-1]]  # type: ignore[attr-defined]  # every mapping of tomlkit can
        except _UNEDITABLE:
            raise DocumentError(f"the place of {'.'.join(path)} is written in a way that can't be edited") from None

    def _table(self, path: KeyPath) -> Any:
        """The table at that path; what is missing is made, inside an inline table as another one."""
        table: Any = self._document
        for depth, name in enumerate(path):
            if name not in table:
                is_outer = depth == 0 and len(path) > 1
                is_inline = isinstance(table, InlineTable)
                table[name] = tomlkit.inline_table() if is_inline else tomlkit.table(is_super_table=is_outer)
            table = table[name]
        return table


def _filled(table: InlineTable, values: Mapping[str, Any]) -> InlineTable:
    for name, value in values.items():
        table[name] = value
    return table
