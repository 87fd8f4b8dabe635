"""The undo record beside a settings file: which entries are ours, and which file holds what was there before. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gateway.clients.merging import Owned, Written

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    existed: bool  # before the first write
    backup: str | None  # its file name; None if there was nothing
    written_sha256: str  # of the whole file as we left it
    is_exact: bool  # only we have changed it since the backup
    entries: tuple[Written, ...]
    made: tuple[Owned, ...]
    folders: tuple[str, ...] = ()  # that were made for it, the innermost first


def dump(record: Record) -> str:
    return json.dumps({"version": _VERSION, **asdict(record)}, indent=2) + "\n"


def load(text: str) -> Record | None:
    """None if it is not one of ours, or cut."""
    try:
        data: dict[str, Any] = json.loads(text)
        if data.pop("version") != _VERSION:
            return None
        data["entries"] = tuple(Written(**{**one, "path": tuple(one["path"])}) for one in data["entries"])
        data["made"] = tuple(Owned(tuple(one["path"]), tuple(one["witness"])) for one in data["made"])
        data["folders"] = tuple(data["folders"])
        return Record(**data)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def joined(old: tuple[Written, ...], new: tuple[Written, ...]) -> tuple[Written, ...]:
    """Later writes of the same path count."""
    by_path = {one.path: one for one in (*old, *new)}
    return tuple(by_path.values())
