"""A request's body: read under a ceiling, uncompressed under the same ceiling."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from gateway.core.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding
from gateway.upstreams.content_coding import codings

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGE = 256 * 1024  # uncompressing more than this would hold up other requests


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The plain bytes. Raises BodyTooLarge, UnsupportedEncoding or InvalidRequest."""
    names = codings(request.headers.get("Content-Encoding", ""))
    unknown = [name for name in names if name not in ("gzip", "deflate")]
    if unknown:
        raise UnsupportedEncoding(f"Content-Encoding {unknown[0][:40]!r} is not supported; send gzip, deflate or none.")
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    data = await _read(request, max_bytes)
    if names and request.content.total_compressed_bytes is None:  # the server did not undo it already
        for name in reversed(names):
            if len(data) > _LARGE:
                data = await asyncio.to_thread(_inflate, data, name, max_bytes)
            else:
                data = _inflate(data, name, max_bytes)
    if data.startswith(_ZSTD_MAGIC):
        raise UnsupportedEncoding("The body is compressed with zstd, which is not supported; send gzip or none.")
    return data


async def _read(request: web.Request, max_bytes: int) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(max_bytes) from None
    except web.RequestPayloadError:
        raise InvalidRequest("The body could not be read: it is cut off, or its compression is damaged.") from None


def _inflate(data: bytes, name: str, max_bytes: int) -> bytes:
    """All members of a gzip body, or one deflate stream, up to the ceiling."""
    out = bytearray()
    try:
        while data:
            inflater = zlib.decompressobj(_window(data, name))
            out += inflater.decompress(data, max_bytes + 1 - len(out))
            if len(out) > max_bytes:
                raise _too_large(max_bytes)
            if not inflater.eof:
                raise InvalidRequest(f"The {name} body is cut off.")
            data = inflater.unused_data
    except zlib.error:
        raise InvalidRequest(f"The body is not valid {name}, though its Content-Encoding says so.") from None
    return bytes(out)


def _window(data: bytes, name: str) -> int:
    if name == "gzip":
        return zlib.MAX_WBITS | 16
    return zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS  # some clients leave the zlib header out


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes / 1024**2:g} MiB (limits.max_request_mib).")
