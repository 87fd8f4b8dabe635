"""What the commands share in reading settings: which file, which flags, how problems are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.settings.errors import SettingsError
from gateway.settings.importers import LoadedSettings, find_settings_file, load_settings


def load(config: str | None, flags: Mapping[str, Any] | None = None) -> LoadedSettings | None:
    """The settings in effect, or None after every problem was printed."""
    path = Path(config).expanduser() if config else find_settings_file(os.environ, Path.cwd())
    try:
        return load_settings(path, environ=os.environ, flags=flags)
    except SettingsError as error:
        print_problems(error)
        return None


def print_problems(error: SettingsError) -> None:
    for problem in error.problems:
        print(f"kvgate: {problem}", file=sys.stderr)
