"""Keys that the settings name by a file: read as they are loaded, and never shown."""

from __future__ import annotations

import stat
from pathlib import Path

from gateway.settings.cleaning import clean_key
from gateway.settings.entries import Draft
from gateway.settings.entries import Path as OptionPath
from gateway.settings.errors import SettingsError
from gateway.settings.files import read_key
from gateway.settings.watching import fingerprint

SUFFIX = "_file"
_KEYS = ("api_key", "key")


def read_key_files(draft: Draft, folder: Path) -> None:
    """Put each key in the place of the option that it is for. Relative paths count from `folder`."""
    for path, value in list(draft.values.items()):
        option = str(path[-1])
        if option.removesuffix(SUFFIX) not in _KEYS or not option.endswith(SUFFIX) or not isinstance(value, str):
            continue
        _take(draft, path, (folder / Path(value).expanduser()).absolute())  # a link may lead elsewhere tomorrow


def _take(draft: Draft, path: OptionPath, file: Path) -> None:
    target: OptionPath = (*path[:-1], str(path[-1]).removesuffix(SUFFIX))
    origin = draft.origins[path]
    if target in draft.values:
        draft.problems.append(f"{origin}: {draft.origin_of(target)} gives the same key; leave one of them out")
        return
    draft.files.setdefault(file, fingerprint(file))
    try:
        key = clean_key(draft, path, read_key(file))
    except SettingsError as error:
        draft.problems += [f"{origin}: {problem}" for problem in error.problems]
        key = None
    draft.expanded.add(target)
    if key is None:
        draft.failed.add(target)
        return
    if _others_may_read(file):
        draft.notices.append(f"{origin}: other users of this machine may read {file.name}; chmod 600 keeps it private")
    draft.values[target] = key
    draft.origins[target] = origin


def _others_may_read(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False
