"""The columns of a table of engines or gateways: this project, again after its peers, and each peer with its ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Cell = tuple[str, int]  # text and width


@dataclass(frozen=True, slots=True)
class Columns:
    """Their widths in characters."""

    label: int
    unit: int
    value: int
    ratio: int

    def titles(self, num_own_runs: int, peers: Iterable[str]) -> list[Cell]:
        found = [("kvgate", self.value)]
        if num_own_runs > 1:
            found += [("again", self.value), ("drift", self.ratio)]
        for name in peers:
            found += [(name, self.value), ("x", self.ratio)]
        return found

    def line(self, label: str, unit: str, cells: Sequence[Cell]) -> str:
        row = "".join(text.rjust(width) for text, width in cells)
        return f"{label.ljust(self.label)}{unit.ljust(self.unit)}{row}".rstrip()
