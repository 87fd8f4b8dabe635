"""Settings from a file of any accepted shape, the environment and flags. The one way in; the rest are its steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gateway.core.spelling import ENGINE_KV_DTYPES
from gateway.settings import checks
from gateway.settings.canonical import canonicalise, take_foreign_kv_dtype
from gateway.settings.cleaning import clean
from gateway.settings.cline_shape import looks_like_json, read_json
from gateway.settings.entries import Draft, Entry
from gateway.settings.environment import CONFIG_VARIABLE, read_environment, read_flags
from gateway.settings.errors import SettingsError
from gateway.settings.files import read_text
from gateway.settings.key_files import read_key_files
from gateway.settings.schema import Settings
from gateway.settings.toml_shape import is_provider_form, parse_toml, read_tree
from gateway.settings.validation import validate
from gateway.settings.watching import Print, fingerprint

DEFAULT_FILE = Path("kvgate.toml")


class Shape(StrEnum):
    """Which of the accepted files it was."""

    NONE = "none"  # no file: defaults, environment and flags
    NATIVE = "native"
    CLINE = "cline-settings"
    CC_SWITCH = "cc-switch"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    settings: Settings
    notices: tuple[str, ...]  # what was adjusted, has no effect, or is unwise
    path: Path | None
    shape: Shape
    files: Mapping[Path, Print] = field(default_factory=dict)  # that and those of keys, just before they were read


def find_settings_file(environ: Mapping[str, str], folder: Path) -> Path | None:
    """The file that is read when none is named: $KVGATE_CONFIG, else kvgate.toml in `folder` if there is one."""
    named = environ.get(CONFIG_VARIABLE, "").strip()
    if named:
        return Path(named).expanduser()
    default = folder / DEFAULT_FILE
    return default if default.exists() or default.is_symlink() else None


def load_settings(
    path: Path | None, *, environ: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> LoadedSettings:
    """Flags over KVGATE_* over the file over defaults. Raises SettingsError with every problem found."""
    environ = os.environ if environ is None else environ
    draft = Draft()
    shape, entries = (Shape.NONE, []) if path is None else _read_file(path, draft)
    draft.overlay(entries)
    draft.overlay(read_environment(environ, draft))
    draft.overlay(read_flags(flags or {}))
    clean(draft, environ)
    read_key_files(draft, Path.cwd() if path is None else path.absolute().parent)
    canonicalise(draft)
    foreign_kv_dtype = take_foreign_kv_dtype(draft)
    settings = _checked(draft, foreign_kv_dtype)
    return LoadedSettings(settings, tuple(dict.fromkeys(draft.notices)), path, shape, draft.files)


def _read_file(path: Path, draft: Draft) -> tuple[Shape, list[Entry]]:
    draft.files[path] = fingerprint(path)
    text = read_text(path)
    source = path.name
    if looks_like_json(text):
        return Shape.CLINE, read_json(text, source, draft)
    tree = parse_toml(text, source)
    entries = read_tree(tree, text, source, draft)
    if not tree:
        draft.notices.append(f"{source} sets nothing: every option has its default")
    return Shape.CC_SWITCH if is_provider_form(tree) else Shape.NATIVE, entries


def _checked(draft: Draft, foreign_kv_dtype: str | None) -> Settings:
    settings = validate(draft)
    if settings is not None:
        draft.problems += checks.refusals(settings, draft)
        _place_foreign_kv_dtype(settings, draft, foreign_kv_dtype)
    if settings is None or draft.problems:
        raise SettingsError(list(dict.fromkeys(draft.problems)), draft.files)
    draft.notices += checks.advice(settings, draft)
    return settings


def _place_foreign_kv_dtype(settings: Settings, draft: Draft, foreign_kv_dtype: str | None) -> None:
    if foreign_kv_dtype is None:
        return
    if settings.effective_engine():
        draft.problems.append(f"{foreign_kv_dtype} is not one of the bundled engine's: {', '.join(ENGINE_KV_DTYPES)}")
    else:
        draft.notices.append(f"{foreign_kv_dtype} has no effect: an upstream chooses the dtype of its KV cache itself")
