"""What an upstream says of when to ask again: read strictly, and never passed on as it was written. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

MAX_SECONDS = 24 * 3600.0  # a longer wait is told as this one: whoever means more is asked again tomorrow

_NAMES = (("retry-after-ms", "Retry-After-Ms", 1000.0), ("retry-after", "Retry-After", 1.0))  # the finer one wins
_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?", re.ASCII)
_MAX_LENGTH = 40  # of a number or a date; no date is longer


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """How long to stay away, by Retry-After-Ms or Retry-After. None = not said, or not in a way that means anything.

    `now` is in seconds since the epoch.
    """
    for name, _, per_second in _NAMES:
        for found, text in headers.items():
            if found.lower() == name and (seconds := _seconds(text.strip(), per_second, now)) is not None:
                return seconds
    return None


def told_again(headers: Mapping[str, str], now: float) -> dict[str, str]:
    """The headers of an upstream with its waits in whole numbers; those that mean nothing are left out."""
    units = {name: (shown, per_second) for name, shown, per_second in _NAMES}
    kept: dict[str, str] = {}
    for name, text in headers.items():
        if name.lower() not in units:
            kept[name] = text
            continue
        shown, per_second = units[name.lower()]
        seconds = _seconds(text.strip(), per_second, now)
        if seconds is not None:
            kept[shown] = str(math.ceil(round(seconds * per_second, 6)))
    return kept


def _seconds(text: str, per_second: float, now: float) -> float | None:
    """A number that isn't negative, or a date that is still to come."""
    if _NUMBER.fullmatch(text):
        return min(float(text) / per_second, MAX_SECONDS)
    if len(text) > _MAX_LENGTH or not text.isascii() or not text.isprintable():
        return None
    try:
        at = parsedate_to_datetime(text)
        left = at.replace(tzinfo=at.tzinfo or UTC).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return min(left, MAX_SECONDS) if left > 0 else None
