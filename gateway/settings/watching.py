"""Whether files have changed since they were read: by time, size and inode. A change counts once it holds still."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

Print = tuple[int, int, int] | None  # None: there is no such file, it can't be seen, or it is a pipe


def fingerprint(path: Path) -> Print:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return None if stat.S_ISFIFO(found.st_mode) else (found.st_mtime_ns, found.st_size, found.st_ino)


class FileWatch:
    """Asked now and then. A file that is being written differs from one time to the next, and is left alone."""

    def __init__(self, prints: Mapping[Path, Print], look: Callable[[Path], Print] = fingerprint) -> None:
        self._look = look
        self._known: dict[Path, Print] = {}  # as they were when they were read
        self._seen: dict[Path, Print] = {}  # as they were when they were looked at last
        self.watch(prints)

    def watch(self, prints: Mapping[Path, Print]) -> None:
        """From now on these, which were so just before they were read."""
        self._known = dict(prints)
        self._seen = {path: self._seen.get(path, known) for path, known in self._known.items()}

    def watch_too(self, prints: Mapping[Path, Print]) -> None:
        """Besides those from before."""
        self.watch({**self._known, **prints})

    def has_changed(self) -> bool:
        """True once for each change that holds still."""
        prints = {path: self._look(path) for path in self._known}
        is_still, self._seen = prints == self._seen, prints
        if prints == self._known or not is_still:
            return False
        self._known = prints
        return True
