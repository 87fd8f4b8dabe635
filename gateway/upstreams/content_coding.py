"""Undoes the compression of an upstream that compresses although it was asked not to. Incremental; no I/O.

What a few bytes grow into comes in pieces of bounded size, so that whoever reads it can stop in time.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli  # type: ignore[import-untyped]

from gateway.core.errors import UpstreamGone

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_PIECE = 256 * 1024  # most bytes that come of one step
_MAX_WINDOW_LOG = 25  # 32 MiB: what zstd may make us allocate before its first byte
_FAULTS = (zlib.error, brotli.error, zstd.ZstdError, EOFError)


class Decoder(Protocol):
    """One coding. `feed` may be told that nothing came; `is_whole` is asked at the end."""

    def feed(self, data: bytes) -> Iterator[bytes]: ...

    @property
    def is_whole(self) -> bool: ...


def codings(header: str) -> list[str]:
    """The codings of a Content-Encoding header, in the order in which they were applied."""
    names = [name.strip().lower() for name in header.split(",")]
    return [{"x-gzip": "gzip"}.get(name, name) for name in names if name not in ("", "identity")]


class ContentDecoder:
    """Decodes a chain of codings. `supported` says whether every one of them is known."""

    def __init__(self, header: str) -> None:
        names = codings(header)
        self.is_plain = not names
        self.supported = all(name in _DECODERS for name in names)
        self._decoders = [_DECODERS[name]() for name in reversed(names)] if self.supported else []

    def decode(self, data: bytes) -> Iterator[bytes]:
        """What the data is, in pieces; what isn't supported, as it is."""
        return self._through(data, 0)

    def check_end(self) -> None:
        """Raises UpstreamGone if the data so far is not the whole."""
        if not all(decoder.is_whole for decoder in self._decoders):
            raise UpstreamGone("The upstream's answer is compressed and ends too early.")

    def _through(self, data: bytes, stage: int) -> Iterator[bytes]:
        if stage == len(self._decoders):
            yield data
            return
        try:
            for piece in self._decoders[stage].feed(data):
                yield from self._through(piece, stage + 1)
        except _FAULTS:
            raise UpstreamGone("The upstream's answer is compressed and damaged.") from None


class _Inflate:
    """gzip, of one or several members, and deflate, with or without a zlib header."""

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


class _Zstd:
    """One or several frames."""

    def __init__(self) -> None:
        self._inner: zstd.ZstdDecompressor | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or (self._inner is not None and not self._inner.needs_input and not self._inner.eof):
            if self._inner is None or self._inner.eof:
                self._inner = zstd.ZstdDecompressor(
                    options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
                )
            piece = self._inner.decompress(data, _PIECE)
            data = self._inner.unused_data if self._inner.eof else b""
            if piece:
                yield piece

    @property
    def is_whole(self) -> bool:
        return self._inner is None or self._inner.eof


def _gzip_window(_data: bytes) -> int:
    return zlib.MAX_WBITS | 16


def _deflate_window(data: bytes) -> int:
    return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: _Inflate(_gzip_window),
    "deflate": lambda: _Inflate(_deflate_window),
    "br": _Brotli,
    "zstd": _Zstd,
}
