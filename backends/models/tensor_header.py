"""How a file of tensors begins and ends: a fixed start that says where the header is, tensors, the header. No torch.

    start (72 bytes) | tensor, at a page's begin | tensor, at a page's begin | ... | header (JSON)

Whoever reads one trusts nothing: length, checksum and every tensor's place are checked before a byte is used.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

MAGIC = b"kvgateTF"
FORMAT = 1
ALIGNMENT = 4096  # of every tensor: a page, so that one can be mapped, advised about or dropped by itself
_START = struct.Struct("<8sIIQQQ32s")  # magic, format, unused, length of the file, header's offset, its length, SHA-256
START_BYTES = _START.size


class UnusableFile(Exception):
    """Not a whole file of this format: what is wrong with it."""


class TensorEntry(Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Header(Struct, frozen=True, kw_only=True):
    """`facts`: what the content depends on; a reader that wants other facts wants another file."""

    facts: dict[str, str]
    tensors: list[TensorEntry]
    tree: dict[str, Any]  # what the tensors are part of; see `tensor_tree`


def padding(offset: int) -> int:
    return -offset % ALIGNMENT


def finish(file: BinaryIO, header: Header) -> None:
    """Write the header where the file ends, then the start that points at it, and see both on the disk."""
    offset = file.tell()
    content = msgspec.json.encode(header)
    file.write(content)
    digest = hashlib.sha256(content).digest()
    file.seek(0)
    file.write(_START.pack(MAGIC, FORMAT, 0, offset + len(content), offset, len(content), digest))
    file.flush()
    os.fsync(file.fileno())


def read_header(file: BinaryIO) -> tuple[Header, int]:
    """The checked header, and the file's length. Raises UnusableFile."""
    start = file.read(START_BYTES)
    if len(start) < START_BYTES or not start.startswith(MAGIC):
        raise UnusableFile("it isn't a file of tensors")
    _, version, _, length, offset, header_bytes, digest = _START.unpack(start)
    if version != FORMAT:
        raise UnusableFile(f"it has format {version}, not {FORMAT}")
    actual = os.fstat(file.fileno()).st_size
    if length != actual or offset + header_bytes != length:
        raise UnusableFile(f"it has {actual} bytes instead of {length}")
    file.seek(offset)
    content = file.read(header_bytes)
    if hashlib.sha256(content).digest() != digest:
        raise UnusableFile("its header is damaged")
    try:
        header = msgspec.json.decode(content, type=Header)
    except msgspec.MsgspecError as error:
        raise UnusableFile(f"its header can't be read: {error}") from error
    if not all(_lies_within(entry, offset) for entry in header.tensors):
        raise UnusableFile("its header points outside it")
    return header, length


def _lies_within(entry: TensorEntry, end: int) -> bool:
    whole = entry.offset >= START_BYTES and entry.num_bytes >= 0 and entry.offset + entry.num_bytes <= end
    return whole and padding(entry.offset) == 0


def read_facts(path: Path) -> dict[str, str] | None:
    """What a file says of itself; None if it isn't a whole one."""
    try:
        with path.open("rb") as file:
            return read_header(file)[0].facts
    except (OSError, UnusableFile):
        return None
