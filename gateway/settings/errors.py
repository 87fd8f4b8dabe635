"""The one error of reading settings. Its text names settings and places, never a secret's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class SettingsError(Exception):
    """The settings can't be used. One problem a line; each says which setting, where, and what to write instead."""

    def __init__(
        self, problems: str | Sequence[str], files: Mapping[Path, tuple[int, int, int] | None] | None = None
    ) -> None:
        """`files`: those that were read, as they were just before; one that is missing may yet come."""
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.files = dict(files or {})
        super().__init__("\n".join(self.problems))
