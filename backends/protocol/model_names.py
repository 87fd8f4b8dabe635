"""What a model's name stands for, and what is plainly wrong with one. Looks at files; fetches and loads nothing.

Asked by the gateway before it starts engines, and by the engine's store before it looks for the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

BUNDLED_NAMES: dict[str, tuple[str, ...]] = {"smollm2": ("smollm2-135m-instruct",)}  # name -> its other spellings
SCRIPTED = "scripted"  # answers without a model, for tests of everything else; options follow a colon

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def bundled_name(name: str) -> str | None:
    """The bundled model that is meant, whatever its case or spelling."""
    wanted = name.lower()
    return next((known for known, others in BUNDLED_NAMES.items() if wanted in (known, *others)), None)


def is_scripted(name: str) -> bool:
    """It is no model that could be looked for."""
    return name.partition(":")[0] == SCRIPTED


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def problem_of(name: str) -> str | None:
    """Why no model can be had by this name, as far as this machine's files tell. A hub id might yet be fetched."""
    if bundled_name(name) is not None:
        return None
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~ of a user that isn't
        path = Path(name)
    if path.is_dir():
        return _problem_of_folder(path)
    if path.is_file():
        return _problem_of_file(path)
    if _looks_like_a_path(name):
        return f"There is no model at {path.absolute()}: no such folder or file. {_choices()}"
    return None if is_hub_id(name) else f"No model is called {name!r}. {_choices()}"


def _choices() -> str:
    return (
        f"Give a bundled model ({', '.join(BUNDLED_NAMES)}), the path of a Hugging Face folder or of a .gguf file, or "
        "a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct. `kvgate model list` shows what is on this machine, "
        "`kvgate model pull NAME` fetches a model."
    )


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name


def _problem_of_file(path: Path) -> str | None:
    try:
        with path.open("rb") as opened:
            is_gguf = opened.read(4) == b"GGUF"
    except OSError as error:
        return f"{path.absolute()} can't be read: {error.strerror}."
    return None if is_gguf else f"{path.absolute()} isn't a GGUF file. Give a .gguf file or a Hugging Face folder."


def _problem_of_folder(folder: Path) -> str | None:
    missing = missing_parts(folder)
    if not missing:
        return None
    return f"The folder {folder.absolute()} isn't a complete Hugging Face model: {'; '.join(missing)}.{_hint(folder)}"


def missing_parts(folder: Path) -> list[str]:
    """What a Hugging Face folder lacks."""
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
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
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
