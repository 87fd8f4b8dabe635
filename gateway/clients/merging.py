"""Our entries into a client's settings and out of them again, as text. Pure: reads and writes no file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.clients.document import MISSING, Document, DocumentError, Format, KeyPath, value_at
from gateway.clients.entries import AnyEntry, Entry, HeaderEntry, fingerprint, put
from gateway.clients.env_document import EnvDocument
from gateway.clients.header_list import with_header
from gateway.clients.json_document import JsonDocument


@dataclass(frozen=True, slots=True)
class Owned:
    """A table that belongs to us alone if we made it. It is still ours while `witness`, a path in it, is unchanged."""

    path: KeyPath
    witness: KeyPath


@dataclass(frozen=True, slots=True)
class Written:
    """What was changed at a path, as the undo record keeps it: never a value, only its fingerprint."""

    path: KeyPath
    fingerprint: str
    header: str = ""  # name of the header, if only that part of the value is ours
    separator: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    text: str
    written: tuple[Written, ...]  # empty: everything was there already
    made: tuple[Owned, ...] = ()  # tables that were not there before


@dataclass(frozen=True, slots=True)
class Unmerged:
    text: str
    is_empty: bool  # nothing is left
    left: tuple[KeyPath, ...]  # entries that somebody changed since


def open_document(format_: Format, text: str) -> Document:
    match format_:
        case Format.JSON:
            return JsonDocument(text)
        case Format.ENV:
            return EnvDocument(text)
        case Format.TOML:
            from gateway.clients.toml_document import TomlDocument  # noqa: PLC0415 - tomlkit, for one client

            return TomlDocument(text)
        case Format.YAML:
            from gateway.clients.yaml_document import YamlDocument  # noqa: PLC0415 - ruamel.yaml, for one client

            return YamlDocument(text)


def merge(format_: Format, text: str, entries: Sequence[AnyEntry], owned: Iterable[Owned] = ()) -> Merged:
    """The text with every entry in place. Raises DocumentError rather than lose a foreign value."""
    newline = "\r\n" if "\r\n" in text else "\n"
    document = open_document(format_, text.replace("\r\n", "\n"))
    before = copy.deepcopy(document.plain())
    expected = copy.deepcopy(before)
    written: list[Written] = []
    for entry in entries:
        present = value_at(document.plain(), entry.path)
        wanted = entry.wanted(present)
        if put(document, entry.path, wanted):
            written.append(_written(entry, wanted))
            _put_plain(expected, entry.path, wanted)
    made = tuple(one for one in owned if value_at(before, one.path) is MISSING) if written else ()
    if not written:
        return Merged(text, ())
    _check(format_, document, expected)
    return Merged(document.text.replace("\n", newline), tuple(written), made)


def unmerge(
    format_: Format, text: str, before_text: str, written: Sequence[Written], made: Sequence[Owned] = ()
) -> Unmerged:
    """The text without our entries; where one replaced a value, that value is back. Others' changes stay."""
    newline = "\r\n" if "\r\n" in text else "\n"
    document = open_document(format_, text.replace("\r\n", "\n"))
    before = open_document(format_, before_text.replace("\r\n", "\n")).plain()
    marks = {one.path: one for one in written}
    left: list[KeyPath] = []
    settled: list[KeyPath] = []
    for owned in made:
        settled.append(owned.path)
        witness, mark = value_at(document.plain(), owned.witness), marks.get(owned.witness)
        if mark is not None and fingerprint(witness) == mark.fingerprint:
            put(document, owned.path, MISSING)
        elif witness is not MISSING:
            left.append(owned.path)
    for mark in written:
        if not any(mark.path[: len(path)] == path for path in settled):
            left += [] if _take_back(document, mark, before) else [mark.path]
    _prune(document, [mark.path for mark in written], before)
    return Unmerged(document.text.replace("\n", newline), not document.plain(), tuple(left))


def _take_back(document: Document, mark: Written, before: dict[str, Any]) -> bool:
    """Whether it was still as we wrote it, or is gone."""
    present, earlier = value_at(document.plain(), mark.path), value_at(before, mark.path)
    if fingerprint(present) == mark.fingerprint:
        put(document, mark.path, earlier)
        return True
    if not mark.header or not isinstance(present, str):
        return present is MISSING
    entry = HeaderEntry(mark.path, mark.header, None, mark.separator)
    was = entry.ours(earlier)
    text = with_header(present, mark.header, None if was is MISSING else was, mark.separator)
    put(document, mark.path, text or MISSING)
    return True


def _prune(document: Document, paths: Sequence[KeyPath], before: dict[str, Any]) -> None:
    """Tables that are empty now and were not there before."""
    outer = {path[:depth] for path in paths for depth in range(1, len(path))}
    for path in sorted(outer, key=len, reverse=True):
        if value_at(document.plain(), path) in ({}, []) and value_at(before, path) is MISSING:
            document.remove(path)


def _written(entry: AnyEntry, value: Any) -> Written:
    if isinstance(entry, Entry):
        return Written(entry.path, fingerprint(value))
    return Written(entry.path, fingerprint(value), entry.name, entry.separator)


def _put_plain(plain: dict[str, Any], path: KeyPath, value: Any) -> None:
    for name in path[:-1]:
        inner = plain.get(name)
        if not isinstance(inner, dict):
            inner = plain[name] = {}
        plain = inner
    if value is MISSING:
        plain.pop(path[-1], None)
    else:
        plain[path[-1]] = value


def _check(format_: Format, document: Document, expected: dict[str, Any]) -> None:
    """Reads the result back: a file that can't be edited safely is not edited."""
    if open_document(format_, document.text).plain() != expected:
        raise DocumentError("its layout can't be edited without touching other settings")
