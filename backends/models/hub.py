"""Models of the Hugging Face hub, and its own cache of them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from backends.models.cache import ModelUnavailable
from backends.protocol.model_names import missing_parts, problem_of

# What an engine reads; a repository's other weight formats would double the download.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


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
    if (problem := problem_of(str(folder))) is not None:
        raise ModelUnavailable(problem)
    return folder.absolute()


_OFFLINE = (
    "Offline: give the path of a Hugging Face folder or a .gguf file copied from elsewhere, "
    "or use the bundled model `smollm2`. Private models need HF_TOKEN."
)
