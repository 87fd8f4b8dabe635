"""Whether files have changed: by time, size and inode. A change counts once it has held still for a moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

Print = tuple[int, int, int] | None  # None: there is no such file, or it can't be seen


def fingerprint(path: Path) -> Print:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


class FileWatch:
    """Asked now and then. A file that is being written differs from one time to the next, and is left alone."""

    def __init__(self, paths: Sequence[Path], look: Callable[[Path], Print] = fingerprint) -> None:
        self._look = look
        self._known: dict[Path, Print] = {}  # as they were when they were read
        self._seen: dict[Path, Print] = {}  # as they were when they were looked at last
        self.watch(paths)

    def watch(self, paths: Sequence[Path]) -> None:
        """From now on these. One that is new counts as it is now, the others as they were."""
        self._known = {path: self._known[path] if path in self._known else self._look(path) for path in paths}
        self._seen = {path: self._seen.get(path, known) for path, known in self._known.items()}

    def has_changed(self) -> bool:
        """True once for each change that holds still."""
        prints = {path: self._look(path) for path in self._known}
        is_still, self._seen = prints == self._seen, prints
        if prints == self._known or not is_still:
            return False
        self._known = prints
        return True
