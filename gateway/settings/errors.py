"""The one error of reading settings. Its text names settings and places, never a secret's value."""

from __future__ import annotations

from collections.abc import Sequence


class SettingsError(Exception):
    """The settings can't be used. One problem a line; each says which setting, where, and what to write instead."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))
