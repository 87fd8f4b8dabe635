"""Reads a settings file, or one that holds a key, as text. Knows encodings and what can go wrong, not their shapes."""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Callable
from pathlib import Path

from gateway.settings.errors import SettingsError

MAX_KEY_BYTES = 64 * 1024


def read_text(path: Path) -> str:
    """A settings file: UTF-8 with or without a byte order mark; not empty. It may be a pipe."""
    text = _decoded(path, _read(path, "the settings file", Path.read_bytes))
    if not text.strip():
        raise SettingsError(f"{path}: the file is empty; leave the file out to use every default")
    return text


def read_key(path: Path) -> str:
    """A file that holds a key; perhaps empty. It never waits for what writes: the gateway would stand still."""
    return _decoded(path, _read(path, "the key file", _regular_bytes))


def _decoded(path: Path, data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:64]:
        raise SettingsError(f"{path}: the file is UTF-16 (or binary); save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{path}, line {line}: the file is not UTF-8; save it as UTF-8") from None


def _regular_bytes(path: Path) -> bytes:
    """Looked at again once it is open, since another file may have taken its place."""
    _require_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as opened:
        _require_regular(path, os.fstat(descriptor).st_mode)
        data = opened.read(MAX_KEY_BYTES + 1)
    if len(data) > MAX_KEY_BYTES:
        raise SettingsError(f"{path}: is larger than {MAX_KEY_BYTES // 1024} KiB; a key file holds a key and no more")
    return data


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _OTHER_KINDS if is_kind(mode)), "no regular file")
        raise SettingsError(f"{path}: is {kind}; a key file must be a regular file, or a link to one")


_OTHER_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _read(path: Path, name: str, read: Callable[[Path], bytes]) -> bytes:
    try:
        return read(path)
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
        raise SettingsError(f"{path}: {name} {what}") from None
    except IsADirectoryError:
        raise SettingsError(f"{path}: is a directory; {name.replace('the ', 'a ')} is needed") from None
    except PermissionError:
        raise SettingsError(f"{path}: may not be read by this user") from None
    except OSError as error:
        raise SettingsError(f"{path}: can't be read: {error.strerror}") from None
