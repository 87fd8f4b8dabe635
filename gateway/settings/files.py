"""Reads a settings file, or one that holds a key, as text. Knows encodings and what can go wrong, not their shapes."""

from __future__ import annotations

import codecs
from pathlib import Path

from gateway.settings.errors import SettingsError


def read_text(path: Path) -> str:
    """UTF-8 with or without a byte order mark; not empty."""
    text = read_plain(path, "the settings file")
    if not text.strip():
        raise SettingsError(f"{path}: the file is empty; leave the file out to use every default")
    return text


def read_plain(path: Path, what: str) -> str:
    """The same, but perhaps empty. `what` is the file's name in a message."""
    data = _read(path, what)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:64]:
        raise SettingsError(f"{path}: the file is UTF-16 (or binary); save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}, line {line}: the file is not UTF-8; save it as UTF-8") from None


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
        raise SettingsError(f"{path}: {name} {what}") from None
    except IsADirectoryError:
        raise SettingsError(f"{path}: is a directory; {name.replace('the ', 'a ')} is needed") from None
    except PermissionError:
        raise SettingsError(f"{path}: may not be read by this user") from None
    except OSError as error:
        raise SettingsError(f"{path}: can't be read: {error.strerror}") from None
