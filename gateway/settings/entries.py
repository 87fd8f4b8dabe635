"""One setting as it was given: where it goes, its value and where it was written. Knows no shape and no schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from typing_extensions import override

from gateway.settings.watching import Print

Path = tuple[str | int, ...]  # such as ("server", "port") or ("keys", 0, "name")


def dotted(path: Path) -> str:
    """`server.port`, `keys[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written. `name` is the writer's own name for the setting."""

    name: str
    source: str  # file name, "environment" or "command line"
    line: int | None = None

    @override
    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{self.name} ({where})"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value for one option of the schema."""

    path: Path
    value: Any
    origin: Origin


@dataclass
class Draft:
    """Settings being put together: values by path, where each came from, and what has to be said about them."""

    values: dict[Path, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    failed: set[Path] = field(default_factory=set)  # taken out because of a problem
    expanded: set[Path] = field(default_factory=set)  # values that came out of the environment; never shown
    files: dict[FilePath, Print] = field(default_factory=dict)  # each as it was just before it was read

    def overlay(self, entries: Iterable[Entry]) -> None:
        """Put a layer of higher precedence on top. A list of tables replaces the one below it as a whole."""
        layer = list(entries)
        replaced = {entry.path[0] for entry in layer if len(entry.path) > 1 and isinstance(entry.path[1], int)}
        replaced |= {
            entry.path[0] for entry in layer if entry.path in {("keys",), ("targets",), ("pairs",), ("routes",)}
        }
        for path in [path for path in self.values if path[0] in replaced]:
            self.remove(path)
        for entry in layer:
            self.values[entry.path] = entry.value
            self.origins[entry.path] = entry.origin

    def remove(self, path: Path) -> None:
        del self.values[path]
        del self.origins[path]

    def fail(self, path: Path) -> None:
        """Take out a value about which a problem was noted."""
        self.failed.add(path)
        self.remove(path)

    def origin_of(self, path: Path) -> str:
        """Where a setting, or the nearest table around it, was written; its own name if it has only its default."""
        for length in range(len(path), 0, -1):
            origin = self.origins.get(path[:length])
            if origin is not None:
                return str(origin) if length == len(path) else f"{dotted(path)} in {origin}"
        siblings = [origin for other, origin in self.origins.items() if len(path) > 1 and other[:-1] == path[:-1]]
        return f"{dotted(path)} (near {siblings[0]})" if siblings else dotted(path)

    def tree(self) -> dict[str, Any]:
        """Nested plain values, lists for numbered parts."""
        root: dict[str | int, Any] = {}
        for path, value in self.values.items():
            place = root
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
        listed = _lists(root)
        assert isinstance(listed, dict)
        return listed


def _lists(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value and all(isinstance(key, int) for key in value):  # one of which all was taken out keeps its place
        return [_lists(value.get(i, {})) for i in range(max(value) + 1)]
    return {key: _lists(inner) for key, inner in value.items()}
