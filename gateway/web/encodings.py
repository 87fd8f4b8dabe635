"""Undoes the compression of a request's body, up to a ceiling: what would grow beyond it is given up early. Pure."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable

import brotli  # type: ignore[import-untyped]

from gateway.core.errors import BodyTooLarge, InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAX_WINDOW_LOG = 25  # 32 MiB: what a zstd body may make us allocate before its first byte; clients use far less
_STEP = 1 << 20  # bytes that a brotli decoder gives at once
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def decode(data: bytes, name: str, max_bytes: int) -> bytes:
    """The plain bytes. Raises BodyTooLarge above `max_bytes`, InvalidRequest for damage."""
    try:
        return _DECODERS[name](data, max_bytes)
    except (zlib.error, zstd.ZstdError, brotli.error):
        raise InvalidRequest(f"The body is not valid {name}, though its Content-Encoding says so.") from None


def _inflate(data: bytes, max_bytes: int, *, name: str) -> bytes:
    """All members of a gzip body, or one deflate stream."""
    parts: list[bytes] = []
    left = max_bytes
    while data:
        inflater = zlib.decompressobj(_window(data, name))
        parts.append(inflater.decompress(data, left + 1))
        left = _checked(left - len(parts[-1]), max_bytes)
        if not inflater.eof:
            raise _cut(name)
        data = inflater.unused_data
    return b"".join(parts)


def _window(data: bytes, name: str) -> int:
    if name == "gzip":
        return zlib.MAX_WBITS | 16
    return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS  # some clients leave the zlib header out


def _unzstd(data: bytes, max_bytes: int) -> bytes:
    """All frames of the body."""
    parts: list[bytes] = []
    left = max_bytes
    while data:
        decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})
        parts.append(decoder.decompress(data, left + 1))
        left = _checked(left - len(parts[-1]), max_bytes)
        if not decoder.eof:
            raise _cut("zstd")
        data = decoder.unused_data
    return b"".join(parts)


def _unbrotli(data: bytes, max_bytes: int) -> bytes:
    """Step by step: the decoder keeps the limit of its output only roughly."""
    parts: list[bytes] = []
    left, decoder = max_bytes, brotli.Decompressor()
    while not decoder.is_finished():
        parts.append(decoder.process(b"" if parts else data, output_buffer_limit=_STEP))
        left = _checked(left - len(parts[-1]), max_bytes)
        if not parts[-1] and not decoder.is_finished():
            raise _cut("br")
    return b"".join(parts)


def _checked(left: int, max_bytes: int) -> int:
    if left < 0:
        raise too_large(max_bytes)
    return left


def too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes / 1024**2:g} MiB (limits.max_request_mib).")


def _cut(name: str) -> InvalidRequest:
    return InvalidRequest(f"The {name} body is cut off.")


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": lambda data, limit: _inflate(data, limit, name="gzip"),
    "deflate": lambda data, limit: _inflate(data, limit, name="deflate"),
    "zstd": _unzstd,
    "br": _unbrotli,
}
ENCODINGS = tuple(_DECODERS)
