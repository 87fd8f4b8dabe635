"""Tensors of a Hugging Face folder's safetensors files, memory-mapped, by name. Knows no model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from backends.models.quantization import EightBitWeight, FourBitWeight
from backends.models.spec import ModelLoadError

QUANTIZED = "quantized.safetensors"  # a GGUF's own low-bit values, beside the same weights as floats


class WeightFiles:
    """Drop it when loading is done: the mapped pages count as this process's memory until then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path in weight_files(folder):
            self._file_of |= dict.fromkeys(self._handle(path).keys(), path)
        self._unread = set(self._file_of)

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except Exception as error:
                raise ModelLoadError(f"{path} can't be read ({error}); fetch the model again.") from error
        return self._open[path]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        path = self._file_of.get(name)
        if path is None:
            raise ModelLoadError(f"The weights in {self._folder} lack {name!r}; the folder is incomplete.")
        self._unread.discard(name)
        tensor: Tensor = self._handle(path).get_tensor(name)
        return tensor

    def unread(self) -> list[str]:
        return sorted(self._unread)


class QuantizedFiles:
    """NAME.q, NAME.d, NAME.m: 4-bit values, scales, minima. NAME.q8, NAME.d8: 8-bit values and scales."""

    def __init__(self, folder: Path) -> None:
        path = folder / QUANTIZED
        self._handle: Any = None
        self._names: set[str] = set()
        if path.is_file():
            self._handle = safe_open(path, framework="pt")
            self._names.update(self._handle.keys())

    def __bool__(self) -> bool:
        return bool(self._names)

    def four_bit(self, name: str) -> FourBitWeight | None:
        if f"{name}.q" not in self._names:
            return None
        return FourBitWeight(*(self._handle.get_tensor(f"{name}.{part}") for part in ("q", "d", "m")))

    def eight_bit(self, name: str) -> EightBitWeight | None:
        if f"{name}.q8" not in self._names:
            return None
        return EightBitWeight(*(self._handle.get_tensor(f"{name}.{part}") for part in ("q8", "d8")))


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} has no {', '.join(missing)}. Weights must be safetensors files in the model's folder."
        )
    return paths


def fingerprint(folder: Path) -> str:
    """Of the config and of every weight file's size and header: cheap, and different for any other model.

    Two models of the same shapes differ in the last thing hashed, a sample of each file's content.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            for part in range(64):
                file.seek(8 + header_bytes + (size - 8 - header_bytes) * part // 64)
                digest.update(file.read(64))
    return digest.hexdigest()[:32]
