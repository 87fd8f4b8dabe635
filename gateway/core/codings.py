"""Undoes the compression of HTTP bodies, whoever sent them: one incremental decoder for each coding. Pure.

What a few bytes grow into comes in pieces of bounded size, so that whoever reads it can stop in time.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli  # type: ignore[import-untyped]

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FAULTS = (zlib.error, brotli.error, zstd.ZstdError, EOFError)  # what a decoder raises for damage
_PIECE = 256 * 1024  # most bytes that come of one step
_MAX_EMPTY_FRAMES = 1000
_MAX_WINDOW_LOG = 25  # 32 MiB: what zstd may make us allocate before its first byte; what is sent uses far less


class Decoder(Protocol):
    """One coding. `feed` may be told that nothing came; `is_whole` is asked at the end."""

    def feed(self, data: bytes) -> Iterator[bytes]: ...

    @property
    def is_whole(self) -> bool:
        """Whether what came so far ends where the coding does. Nothing at all does."""
        ...


def codings(header: str) -> list[str]:
    """The codings of a Content-Encoding header, in the order in which they were applied."""
    names = [name.strip().lower() for name in header.split(",")]
    return [{"x-gzip": "gzip"}.get(name, name) for name in names if name not in ("", "identity")]


class _Inflate:
    """gzip, of one or several members, and deflate."""

    def __init__(self, window_bits: Callable[[bytes], int]) -> None:
        self._window_bits = window_bits
        self._inner: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        is_full = False  # the last piece was: more may come without more data
        while data or is_full:
            if self._inner is None or self._inner.eof:
                self._inner = zlib.decompressobj(self._window_bits(data))
            piece = self._inner.decompress(data, _PIECE)
            data = self._inner.unused_data if self._inner.eof else self._inner.unconsumed_tail
            is_full = len(piece) == _PIECE and not self._inner.eof
            if piece:
                yield piece

    @property
    def is_whole(self) -> bool:
        return self._inner is None or self._inner.eof


def _gzip_window(_data: bytes) -> int:
    return zlib.MAX_WBITS | 16


def _deflate_window(data: bytes) -> int:
    return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS  # some senders leave the zlib header out


class _Zstd:
    """One or several frames. So many without anything in them are there to keep us busy."""

    def __init__(self) -> None:
        self._inner: zstd.ZstdDecompressor | None = None
        self._num_empty = 0  # frames in a row

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or (self._inner is not None and not self._inner.needs_input and not self._inner.eof):
            if self._inner is None or self._inner.eof:
                self._inner = zstd.ZstdDecompressor(
                    options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
                )
            piece = self._inner.decompress(data, _PIECE)
            data = self._inner.unused_data if self._inner.eof else b""
            if piece:
                self._num_empty = 0
                yield piece
            elif self._inner.eof:
                self._num_empty += 1
                if self._num_empty > _MAX_EMPTY_FRAMES:
                    raise zstd.ZstdError("too many frames without content")

    @property
    def is_whole(self) -> bool:
        return self._inner is None or self._inner.eof


class _Brotli:
    def __init__(self) -> None:
        self._inner = brotli.Decompressor()
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._has_begun = self._has_begun or bool(data)
        while piece := self._inner.process(data, output_buffer_limit=_PIECE):
            data = b""  # what it holds back comes without more data
            yield piece

    @property
    def is_whole(self) -> bool:
        return not self._has_begun or bool(self._inner.is_finished())


DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: _Inflate(_gzip_window),
    "deflate": lambda: _Inflate(_deflate_window),
    "zstd": _Zstd,
    "br": _Brotli,
}
