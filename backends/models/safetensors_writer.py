"""Writes a safetensors file one tensor at a time, so a model never has to fit in memory. Knows nothing of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

DTYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written; `produce` is called once, when its turn comes."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    produce: Callable[[], Array]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, entries: Sequence[TensorEntry], metadata: dict[str, str]) -> None:
    """Write all entries. Wide types come first: then every tensor lies aligned to its own width in a memory map."""
    ordered = sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize)
    with path.open("xb") as file:
        header = _header(ordered, metadata)
        file.write(len(header).to_bytes(8, "little") + header)
        for entry in ordered:
            array = np.ascontiguousarray(entry.produce(), dtype=DTYPES[entry.dtype])
            assert array.shape == entry.shape, f"{entry.name}: {array.shape} instead of {entry.shape}"
            file.write(array.data)


def _header(entries: Sequence[TensorEntry], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)  # the data must start at a multiple of 8
