"""Strings as they are meant: references resolved, blanks trimmed, keys fit for a header. Never shows a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.settings.entries import Draft, Path
from gateway.settings.env_refs import UnresolvedReference, expand, foreign_reference
from gateway.settings.options import accepts, is_secret

_BLANKS = " \t\r\n\v\f\u00a0\u3000\ufeff\u200b"
_PLACEHOLDERS = ("sk-...", "sk-your", "your-key", "your-taotoken-key", "changeme")


def clean(draft: Draft, environ: Mapping[str, str]) -> None:
    """Clean every string of the draft in place."""
    for path, value in list(draft.values.items()):
        if isinstance(value, str):
            _clean_option(draft, path, value, environ)
        elif isinstance(value, list):
            items = [_clean_text(draft, path, item, environ) if isinstance(item, str) else item for item in value]
            draft.values[path] = [item for item in items if item is not None]
        elif isinstance(value, dict):
            draft.values[path] = _clean_mapping(draft, path, value, environ)


def clean_key(draft: Draft, path: Path, text: str) -> str | None:
    """What a key's file holds, without its line end. Nothing in it is a reference. None after a problem was noted."""
    origin = draft.origin_of(path)
    trimmed = text.strip(_BLANKS)
    if not trimmed:
        draft.problems.append(f"{origin}: the file is empty; it must hold the key")
        return None
    if any(ord(character) < 32 or ord(character) == 127 for character in trimmed):
        draft.problems.append(f"{origin}: the file must hold the key alone, in one line")
        return None
    return _clean_secret(draft, path, trimmed)


def _clean_mapping(draft: Draft, path: Path, value: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Every value may be a secret: none is ever shown."""
    draft.expanded.add(path)
    items = {
        key: _clean_text(draft, path, item, environ) if isinstance(item, str) else item for key, item in value.items()
    }
    return {key: item for key, item in items.items() if item is not None}


def _clean_option(draft: Draft, path: Path, value: str, environ: Mapping[str, str]) -> None:
    text = _clean_text(draft, path, value, environ)
    if text is not None and is_secret(path):
        text = _clean_secret(draft, path, text)
    if text is None:
        draft.fail(path)
    elif text:
        draft.values[path] = text
    else:
        _empty(draft, path)


def _clean_text(draft: Draft, path: Path, value: str, environ: Mapping[str, str]) -> Any:
    """The text, or None after a problem was noted."""
    origin = draft.origin_of(path)
    try:
        text = expand(value, environ)
    except UnresolvedReference as error:
        draft.problems.append(f"{origin}: {error}")
        return None
    if text != value:
        draft.expanded.add(path)
    trimmed = text.strip(_BLANKS)
    if trimmed != text and trimmed:
        draft.notices.append(f"{origin}: blanks or line breaks around the value were removed")
    if any(ord(character) < 32 or ord(character) == 127 for character in trimmed):
        draft.problems.append(f"{origin}: has a line break or another control character inside")
        return None
    return trimmed


def _clean_secret(draft: Draft, path: Path, text: str) -> str | None:
    """A key as it goes into `Authorization: Bearer`."""
    origin = draft.origin_of(path)
    if text.lower().startswith("bearer "):
        text = text[len("bearer ") :].strip(_BLANKS)
        draft.notices.append(f"{origin}: the word Bearer was removed; the key alone is needed")
    if foreign_reference(text):
        draft.problems.append(f"{origin}: is a reference in another program's notation; write ${{NAME}}")
        return None
    if not text.isascii() or any(character in _BLANKS for character in text):
        draft.problems.append(f"{origin}: has a blank or a character inside that can't be part of a key")
        return None
    if any(word in text.lower() for word in _PLACEHOLDERS):
        draft.notices.append(f"{origin}: looks like a placeholder, not a key")
    return text


def _empty(draft: Draft, path: Path) -> None:
    """Empty means none where none is possible; a client key that is empty would open the gateway, so it is refused."""
    table, key = str(path[0]), str(path[-1])
    if accepts(table, key, type(None)):
        draft.notices.append(f"{draft.origin_of(path)}: is empty and counts as not set")
        draft.remove(path)
    else:
        draft.problems.append(f"{draft.origin_of(path)}: is empty")
        draft.fail(path)
