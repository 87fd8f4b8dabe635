"""Hugging Face folders: whether one can be loaded, and the hub's own cache of them. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from backends.models.cache import ModelUnavailable

# What an engine reads; a repository's other weight formats would double the download.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def checked_folder(folder: Path) -> Path:
    """The folder itself; raises `ModelUnavailable` saying what it lacks."""
    missing = missing_parts(folder)
    if missing:
        raise ModelUnavailable(
            f"The folder {folder.absolute()} isn't a complete Hugging Face model: {'; '.join(missing)}.{_hint(folder)}"
        )
    return folder.absolute()


def missing_parts(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json is missing"]
    if not any((folder / file).is_file() for file in _TOKENIZERS):
        missing.append(f"no tokenizer ({', '.join(_TOKENIZERS)})")
    return missing + _missing_weights(folder)


def _missing_weights(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return []
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["no model.safetensors and no model.safetensors.index.json"]
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        return [f"model.safetensors.index.json can't be read ({error})"]
    absent = [file for file in files if not (folder / file).is_file()]
    return [f"{len(absent)} of {len(files)} weight files are missing, the first is {absent[0]}"] if absent else []


def _hint(folder: Path) -> str:
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is not None:
        return f" To use the GGUF file in it, give {gguf} as the model."
    if any(folder.glob("*.bin")):
        return " Weights in .bin files aren't read, since loading one runs code from it; convert them to safetensors."
    return ""


def snapshot(repo_id: str, *, fetch: bool) -> Path:
    """The model's folder in the hub's cache, downloaded if it isn't complete there and `fetch` allows it."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  (only for hub ids)
    except ModuleNotFoundError as error:
        raise ModelUnavailable(
            f"{repo_id} is a hub id, which needs huggingface_hub: install kvgate[engine]."
        ) from error
    try:
        cached = Path(snapshot_download(repo_id, local_files_only=True))
        if not missing_parts(cached):
            return cached
    except (OSError, ValueError):  # both are bases of the hub's "not here"
        pass
    if not fetch or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        why = "HF_HUB_OFFLINE forbids downloading it" if fetch else f"run `kvgate model pull {repo_id}`"
        raise ModelUnavailable(f"{repo_id} isn't in the hub's cache on this machine; {why}. {_OFFLINE}")
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=PATTERNS))
    except Exception as error:  # the hub's client raises errors of several libraries
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelUnavailable(
            f"{repo_id} isn't in the hub's cache on this machine and couldn't be downloaded: {first_line} {_OFFLINE}"
        ) from error
    return checked_folder(folder)


_OFFLINE = (
    "Offline: give the path of a Hugging Face folder or a .gguf file copied from elsewhere, "
    "or use the bundled model `smollm2`. Private models need HF_TOKEN."
)
