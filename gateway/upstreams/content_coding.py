"""Undoes gzip and deflate of an upstream that compresses although it was asked not to. Incremental; no I/O."""

from __future__ import annotations

import zlib
from typing import Protocol

from gateway.core.errors import UpstreamGone


class _Inflater(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...


def codings(header: str) -> list[str]:
    """The codings of a Content-Encoding header, in the order in which they were applied."""
    names = [name.strip().lower() for name in header.split(",")]
    return [{"x-gzip": "gzip"}.get(name, name) for name in names if name not in ("", "identity")]


class ContentDecoder:
    """Decodes a chain of codings. `supported` says whether every one of them is known."""

    def __init__(self, header: str) -> None:
        names = codings(header)
        self.supported = all(name in ("gzip", "deflate") for name in names)
        self._inflaters = [_inflater(name) for name in reversed(names)] if self.supported else []

    def decode(self, data: bytes) -> bytes:
        for inflater in self._inflaters:
            try:
                data = inflater.decompress(data)
            except zlib.error:
                raise UpstreamGone("The upstream's answer is compressed and damaged.") from None
        return data


def _inflater(name: str) -> _Inflater:
    return zlib.decompressobj(zlib.MAX_WBITS | 16) if name == "gzip" else _Deflate()


class _Deflate:
    """`deflate` should have a zlib header; some servers leave it out."""

    def __init__(self) -> None:
        self._inner: _Inflater | None = None

    def decompress(self, data: bytes, /) -> bytes:
        if not data:
            return b""
        if self._inner is None:
            self._inner = zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS)
        return self._inner.decompress(data)
