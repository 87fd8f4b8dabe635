"""The thin edge: reads a file, replaces it whole or not at all, keeps its mode, follows links. Knows no format."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.clients.errors import ClientFileError

PRIVATE = 0o600  # of a new file: it holds a key
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class Present:
    """A file as it was read. `data` is None if there is none."""

    path: Path  # behind all links
    data: bytes | None
    mode: int = PRIVATE

    @property
    def text(self) -> str:
        """Without a byte order mark; `with_bom` puts it back."""
        try:
            return (self.data or b"").decode("utf-8").removeprefix(_BOM)
        except UnicodeDecodeError:
            raise ClientFileError(f"{self.path}: the file is not UTF-8 text; it is left as it is") from None

    def encoded(self, text: str) -> bytes:
        bom = _BOM if (self.data or b"").startswith(_BOM.encode()) else ""
        return (bom + text).encode("utf-8")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(path: Path) -> Present:
    try:
        real = path.resolve()
        if not real.exists():
            return Present(real, None)
        if not real.is_file():
            raise ClientFileError(f"{path}: is not a file")
        return Present(real, real.read_bytes(), stat.S_IMODE(real.stat().st_mode))
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = error.strerror if isinstance(error, OSError) else "its links go round in a circle"
        raise ClientFileError(f"{path}: can't be read: {reason}") from None


def make_folder(folder: Path) -> tuple[str, ...]:
    """The folders that were missing, the innermost first."""
    made: list[str] = []
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700)
            made.insert(0, str(one))
    except OSError as error:
        raise ClientFileError(f"{folder}: can't be made: {error.strerror}") from None
    return tuple(made)


def replace(present: Present, data: bytes) -> None:
    """Puts `data` in the file's place at once. Refuses if somebody changed the file since it was read."""
    if read(present.path).data != present.data:
        raise ClientFileError(f"{present.path}: was changed by another program just now; run the command again")
    write_atomically(present.path, data, present.mode)


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """A reader sees the old file or the new one, never a part."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _keep_owner(path, temporary)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise ClientFileError(f"{path}: can't be written: {error.strerror}; nothing was changed") from None


def _keep_owner(path: Path, temporary: str) -> None:
    """A file of another user stays theirs when root edits it."""
    with suppress(OSError):
        owner = path.stat()
        if (owner.st_uid, owner.st_gid) != (os.getuid(), os.getgid()):
            os.chown(temporary, owner.st_uid, owner.st_gid)


def delete(path: Path, folders: tuple[str, ...] = ()) -> None:
    """The file, and those of the folders that are empty then."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ClientFileError(f"{path}: can't be deleted: {error.strerror}") from None
    for folder in folders:
        with suppress(OSError):  # not empty: somebody uses it
            Path(folder).rmdir()


def free_name(path: Path) -> Path:
    """`path` with a number, if there is such a file already."""
    candidate, number = path, 1
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
