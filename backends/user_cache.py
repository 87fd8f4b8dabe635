"""Where this user's cache lies: converted models, compiled kernels. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`KVGATE_CACHE_DIR`, else `kvgate` in `XDG_CACHE_HOME`, else `~/.cache/kvgate`."""
    if own := os.environ.get("KVGATE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"  # the standard ignores relative ones
    return base / "kvgate"
