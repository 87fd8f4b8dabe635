"""Tensors written once into a file and mapped read-only by every process, which then share its pages. Knows no models.

A mapped tensor must not be written to: the system ends a process that tries.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from backends.models.tensor_header import (
    START_BYTES,
    Header,
    TensorEntry,
    UnusableFile,
    finish,
    padding,
    read_header,
)
from backends.models.tensor_tree import decode, encode

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Parts = Iterable[tuple[str, Any]]  # by name, made one after the other, so that only one has to be in memory
Reserve = Callable[[int], None]  # called before that many bytes are written; raises OSError if there is no room


def write_parts(file: BinaryIO, facts: dict[str, str], parts: Parts, reserve: Reserve) -> None:
    """Each part is let go once it is written."""
    writer = _Writer(file, reserve)
    tree = {name: encode(part, writer.put) for name, part in parts}
    finish(file, Header(facts=facts, tensors=writer.entries, tree=tree))


class _Writer:
    def __init__(self, file: BinaryIO, reserve: Reserve) -> None:
        self.entries: list[TensorEntry] = []
        self._file = file
        self._reserve = reserve
        self._written: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        file.write(bytes(START_BYTES))

    def put(self, tensor: Tensor) -> int:
        """A tensor that two parts have, such as the embedding of a tied model, is written once."""
        known = self._written.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        content = tensor.detach().contiguous()
        num_bytes = content.numel() * content.element_size()
        self._reserve(num_bytes)
        self._file.write(bytes(padding(self._file.tell())))
        entry = TensorEntry(_NAMES[content.dtype], tuple(content.shape), self._file.tell(), num_bytes)
        if num_bytes:
            self._file.write(content.flatten().view(torch.uint8).numpy().data)
        self.entries.append(entry)
        self._written[id(tensor)] = (weakref.ref(tensor), len(self.entries) - 1)
        return len(self.entries) - 1


def map_parts(path: Path, facts: dict[str, str]) -> dict[str, Any]:
    """The parts that were written, over the file's own pages. Raises OSError, or UnusableFile for any other file."""
    with path.open("rb") as file:
        header, length = read_header(file)
        if header.facts != facts:
            raise UnusableFile("it belongs to another model, or to another way of packing it")
        content = _mapped(file, length)
    try:
        tensors = [_tensor(content, entry) for entry in header.tensors]
        return {name: decode(part, tensors) for name, part in header.tree.items()}
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise UnusableFile(f"its content can't be read: {error}") from error


def _mapped(file: BinaryIO, length: int) -> Tensor:
    """The file as bytes. The mapping lives as long as any tensor of it."""
    pages = mmap.mmap(file.fileno(), length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        pages.madvise(mmap.MADV_WILLNEED)  # read ahead what isn't in memory yet; takes nothing of this process' own
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # that is the point
        return torch.frombuffer(pages, dtype=torch.uint8)


def _tensor(content: Tensor, entry: TensorEntry) -> Tensor:
    part = content[entry.offset : entry.offset + entry.num_bytes]
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return part.view(DTYPES[entry.dtype]).view(entry.shape)
