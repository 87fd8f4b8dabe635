"""The user's cache of converted models: where it lies, which folders are complete, how one is replaced at once.

Knows nothing of formats or downloads. Cheap to import: looking up a ready model must not cost a start.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.user_cache import user_cache

MARKER = "kvgate.json"  # written last; its presence and the sizes in it make a folder complete
FORMAT = 3  # of a converted folder; one of another format is converted again
_PARTIAL = ".partial-"


class ModelUnavailable(Exception):
    """The model can't be had: what was tried, and what to do about it."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    path: Path
    marker: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(self.marker["files"].values())


def models_dir() -> Path:
    return user_cache() / "models"


def folder_for(name: str, sha256: str) -> Path:
    return models_dir() / f"{name}-{sha256[:12]}"


def read_complete(folder: Path) -> CachedModel | None:
    """The folder, if it was written to its end by this format and no file has changed its size since."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if marker["format"] != FORMAT:
            return None
        if any((folder / file).stat().st_size != size for file, size in marker["files"].items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return CachedModel(folder, marker)


def complete_models() -> list[CachedModel]:
    try:
        folders = sorted(models_dir().iterdir())
    except FileNotFoundError:
        return []
    found = (read_complete(folder) for folder in folders if not folder.name.startswith("."))
    return [model for model in found if model is not None]


@contextmanager
def building(folder: Path) -> Iterator[Path | None]:
    """Yield an empty folder to fill, which then takes `folder`'s place at once; None if another process just did it.

    Only one process builds a folder at a time. What an earlier, killed one left behind is removed.
    """
    _require_writable(folder.parent)
    with _locked(folder):
        if read_complete(folder) is not None:
            yield None
            return
        for leftover in folder.parent.glob(f"{_PARTIAL}{folder.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{_PARTIAL}{folder.name}-", dir=folder.parent) as partial:
            target = Path(partial) / "model"
            target.mkdir()
            yield target
            if folder.exists():  # incomplete, or of an older format
                folder.rename(Path(partial) / "old")
            target.rename(folder)


def _require_writable(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ModelUnavailable(
            f"The model cache {parent} can't be written: {error.strerror}. Set KVGATE_CACHE_DIR to a folder that can."
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout  # noqa: PLC0415  (only needed to build)

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sys.stderr.write(f"kvgate: another process is preparing {folder.name}; waiting for it\n")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
