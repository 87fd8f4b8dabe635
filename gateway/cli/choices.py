"""Options that take several names of a closed set, separated by commas."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.bench.options import CompareError


def chosen(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names in `text`, in the order of `known`; "all" is all of them."""
    names = {name.strip().lower() for name in text.split(",")}
    if names == {"all"}:
        return tuple(known)
    unknown = sorted(names - set(known))
    if unknown:
        raise CompareError(f"{flag} {text!r}: {unknown[0]!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in names)
