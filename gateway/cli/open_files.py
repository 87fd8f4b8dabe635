"""How many files this process may have open: a request is one or two, and many systems start at 256 or 1024."""

from __future__ import annotations

import sys

WANTED = 10240  # macOS allows no more, whatever it says


def raise_open_file_limit() -> None:
    """Up to what the system allows without asking; never down. Does nothing where there is no such limit."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
