"""Headers in one text, as some clients take them: `Name: value` with a separator. Foreign ones stay as they are."""

from __future__ import annotations


def split_headers(text: str, separator: str) -> dict[str, str]:
    """Name -> value; what is no header is left out."""
    pairs = (line.partition(":") for line in text.split(separator))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon and name.strip()}


def with_header(text: str, name: str, value: str | None, separator: str) -> str:
    """The text with that header set, or without it."""
    parts = text.split(separator) if text.strip() else []
    places = [i for i, part in enumerate(parts) if part.partition(":")[0].strip().lower() == name.lower()]
    kept = [part for i, part in enumerate(parts) if i not in places]
    if value is None:
        return separator.join(kept)
    written = f"{name}: {value}" if separator == "\n" else f"{name}:{value}"  # no blanks among commas
    if not places:
        return separator.join([*kept, written])
    kept.insert(places[0], written)
    return separator.join(kept)
