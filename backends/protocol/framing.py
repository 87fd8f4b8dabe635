"""Frames on a local stream socket: a 4-byte little-endian length, then msgpack. Knows nothing of what messages mean."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER = struct.Struct("<I")
T = TypeVar("T")


class FrameTooLarge(ValueError):
    """A frame is longer than `MAX_FRAME_BYTES`: the stream is not one of ours, or is broken."""


class Encoder:
    """Turns messages into frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct) -> bytes:
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise FrameTooLarge(f"A frame of {len(body)} bytes was to be sent; the limit is {MAX_FRAME_BYTES}.")
        return _HEADER.pack(len(body)) + body


class Decoder(Generic[T]):
    """Collects bytes as they arrive and yields whole messages of the given union.

    `Decoder(ToEngine)` is typed by the union's members; a message outside it raises `msgspec.ValidationError`.
    """

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Add bytes; yield each message that is now complete, in order."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameTooLarge(f"A frame announces {length} bytes; the limit is {MAX_FRAME_BYTES}.")
                end = start + _HEADER.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                yield self._decoder.decode(body)
        finally:
            del self._buffer[:start]
