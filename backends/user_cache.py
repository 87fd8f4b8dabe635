"""Where this user's cache lies: converted models, packed weights, compiled kernels; and who may write. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def user_cache() -> Path:
    """`KVGATE_CACHE_DIR`, else `kvgate` in `XDG_CACHE_HOME`, else `~/.cache/kvgate`."""
    if own := os.environ.get("KVGATE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"  # the standard ignores relative ones
    return base / "kvgate"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Of all processes one at a time is in here; the others wait. A process that dies inside lets the next one in."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
