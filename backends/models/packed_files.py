"""The user's files of packed weights: which there are, writing one whole or not at all, and which ones go. No torch.

They are copies, made again whenever one is missing, so the folder is kept small by itself. Each time one is written,
those go that nothing will ask for again, and of the others the longest unused beyond MAX_FILES.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from backends.models.tensor_header import read_facts
from backends.user_cache import user_cache

SUFFIX = ".weights"
_PARTIAL = ".partial"
MAX_FILES = 4
MIN_FREE_BYTES = 1 << 30  # left on the disk, whatever is written


@dataclass(frozen=True, slots=True)
class PackedFile:
    path: Path
    facts: dict[str, str]
    num_bytes: int
    used_at: float


def packed_dir() -> Path:
    return user_cache() / "weights"


def packed_files(folder: Path | None = None) -> list[PackedFile]:
    """All whole ones, the latest used first."""
    found = []
    for path in (folder or packed_dir()).glob(f"*{SUFFIX}"):
        facts = read_facts(path)
        with contextlib.suppress(OSError):  # it has just been removed
            stat = path.stat()
            if facts is not None:
                found.append(PackedFile(path, facts, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda file: file.used_at, reverse=True)


def mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):  # a cache that can only be read is as good
        os.utime(path)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes `path`'s place at once when all went well, and is gone otherwise. To be called under the lock.

    Processes that have an older file mapped keep its pages until they end.
    """
    for leftover in path.parent.glob(f"*{_PARTIAL}"):  # of a process that was killed: only one writes at a time
        leftover.unlink(missing_ok=True)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reserve(folder: Path, free_bytes: Callable[[Path], int] | None = None) -> Callable[[int], None]:
    """Refuses to write what would leave less than MIN_FREE_BYTES: a full disk harms more than a slower start."""
    free = free_bytes or (lambda path: shutil.disk_usage(path).free)

    def check(num_bytes: int) -> None:
        if free(folder) - num_bytes < MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, f"less than {MIN_FREE_BYTES >> 30} GiB would stay free on the disk")

    return check


def remove_outdated(written: Path, facts: dict[str, str], max_files: int = MAX_FILES) -> None:
    """To be called under the lock, after `written` was."""
    files = packed_files(written.parent)
    current = [file.path for file in files if file.path != written and not _is_outdated(file.facts, facts)]
    kept = {written, *current[: max_files - 1]}
    for path in written.parent.glob(f"*{SUFFIX}"):
        if path not in kept:  # torn ones and those of another format too
            path.unlink(missing_ok=True)


def _is_outdated(old: dict[str, str], new: dict[str, str]) -> bool:
    """Whether its model is gone or changed, or the same choice of data types is packed in another way here now."""
    if not Path(old.get("folder", "")).is_dir():
        return True
    if old["folder"] != new["folder"]:
        return False
    same_choice = all(old.get(name) == new.get(name) for name in ("dtype", "weight_dtype", "processor"))
    return same_choice or old.get("content") != new["content"]


def remove_all(folder: Path | None = None) -> list[PackedFile]:
    """What was removed. Engines that run keep what they have mapped; the next start packs again."""
    files = packed_files(folder)
    for path in (folder or packed_dir()).glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)
    return files
