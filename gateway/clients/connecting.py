"""Our entries into a client's settings file and out of it again, with a backup and an undo record beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.clients import files
from gateway.clients.document import DocumentError, Format, KeyPath
from gateway.clients.entries import AnyEntry
from gateway.clients.errors import ClientFileError
from gateway.clients.merging import Merged, Owned, merge, unmerge
from gateway.clients.record import Record, dump, joined, load

BACKUP_ENDING = ".kvgate-backup"
RECORD_ENDING = ".kvgate-undo.json"
_LEFT_ALONE = "The file is left as it is: correct it, or merge by hand what kvgate connect prints"


@dataclass(frozen=True, slots=True)
class WriteResult:
    path: Path
    changed: tuple[KeyPath, ...]  # empty: nothing had to be done
    backup: Path | None = None  # made by this write
    is_readable_by_others: bool = False


@dataclass(frozen=True, slots=True)
class UndoResult:
    path: Path
    is_exact: bool  # the file is byte for byte as it was before the first write
    deleted: bool = False
    left: tuple[KeyPath, ...] = ()  # changed by others since, and therefore kept
    backup: Path | None = None  # still there


def write(path: Path, format_: Format, entries: Sequence[AnyEntry], owned: Sequence[Owned] = ()) -> WriteResult:
    """Raises ClientFileError, with the file as it was."""
    present = files.read(path)
    try:
        merged = merge(format_, present.text, entries, owned)
    except DocumentError as error:
        raise ClientFileError(f"{path}: {error}. {_LEFT_ALONE}") from None
    is_open = bool(present.data is not None and present.mode & 0o044)
    if not merged.written:
        return WriteResult(path, (), is_readable_by_others=is_open)
    old = _record_of(path)
    folders = (*files.make_folder(path.parent), *files.make_folder(present.path.parent))
    new = present.encoded(merged.text)
    backup = _back_up(path, present, old)
    record = _next_record(old, present, merged=merged, new=new, backup=backup, folders=folders)
    files.write_atomically(_record_path(path), dump(record).encode(), files.PRIVATE)
    files.replace(present, new)
    return WriteResult(path, tuple(one.path for one in merged.written), backup, is_open)


def undo(path: Path, format_: Format) -> UndoResult | None:
    """None if nothing was written here. Raises ClientFileError, with the file as it was."""
    record = _record_of(path)
    if record is None:
        return None
    present = files.read(path)
    backup = path.with_name(record.backup) if record.backup else None
    before = files.read(backup) if backup else None
    if before is not None and before.data is None:
        raise ClientFileError(f"{backup}: the backup is gone, so what was before is not known; {path} is left as it is")
    unchanged = present.data is not None and files.sha256(present.data) == record.written_sha256
    if record.is_exact and unchanged:
        return _restore(path, present, before, record, backup)
    return _take_out(path, format_, present=present, before=before, record=record, backup=backup)


def _restore(
    path: Path, present: files.Present, before: files.Present | None, record: Record, backup: Path | None
) -> UndoResult:
    if before is None or before.data is None:
        files.delete(present.path)
        files.delete(_record_path(path), record.folders)
        return UndoResult(path, is_exact=True, deleted=True)
    files.replace(present, before.data)
    files.delete(_record_path(path))
    assert backup is not None
    files.delete(backup)  # the file itself is that again
    return UndoResult(path, is_exact=True)


def _take_out(
    path: Path,
    format_: Format,
    *,
    present: files.Present,
    before: files.Present | None,
    record: Record,
    backup: Path | None,
) -> UndoResult:
    """Somebody changed the file since: only what is ours goes."""
    if present.data is None:
        files.delete(_record_path(path))
        return UndoResult(path, is_exact=before is None, deleted=True, backup=backup)
    try:
        result = unmerge(format_, present.text, before.text if before else "", record.entries, record.made)
    except DocumentError as error:
        raise ClientFileError(f"{path}: {error}. {_LEFT_ALONE}") from None
    deleted = result.is_empty and before is None
    if deleted:
        files.delete(present.path)
    else:
        files.replace(present, present.encoded(result.text))
    files.delete(_record_path(path), record.folders if deleted else ())
    return UndoResult(path, is_exact=False, deleted=deleted, left=result.left, backup=backup)


def _next_record(
    old: Record | None,
    present: files.Present,
    *,
    merged: Merged,
    new: bytes,
    backup: Path | None,
    folders: tuple[str, ...],
) -> Record:
    sha = files.sha256(new)
    if old is None:
        name = backup.name if backup else None
        return Record(present.data is not None, name, sha, True, merged.written, merged.made, folders)
    is_exact = old.is_exact and present.data is not None and files.sha256(present.data) == old.written_sha256
    return replace(
        old,
        written_sha256=sha,
        is_exact=is_exact,
        entries=joined(old.entries, merged.written),
        made=tuple(dict.fromkeys((*old.made, *merged.made))),
    )


def _back_up(path: Path, present: files.Present, old: Record | None) -> Path | None:
    """A copy beside the file, unless it is just what we wrote ourselves. It may hold keys: for its owner alone."""
    if present.data is None or (old is not None and files.sha256(present.data) == old.written_sha256):
        return None
    backup = files.free_name(path.with_name(path.name + BACKUP_ENDING))
    files.write_atomically(backup, present.data, files.PRIVATE)
    return backup


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + RECORD_ENDING)


def _record_of(path: Path) -> Record | None:
    present = files.read(_record_path(path))
    if present.data is None:
        return None
    record = load(present.text)
    if record is None:
        raise ClientFileError(f"{_record_path(path)}: is damaged; delete it to begin anew (backups are beside it)")
    return record
