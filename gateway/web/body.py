"""A request's body: read under a ceiling, uncompressed under the same ceiling."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gateway.core.codings import codings
from gateway.core.errors import InvalidRequest, UnsupportedEncoding
from gateway.web.encodings import ENCODINGS, ZSTD_MAGIC, decode, too_large

_MAX_CODINGS = 2  # one on top of the other; no client needs more


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The plain bytes. Raises BodyTooLarge, UnsupportedEncoding or InvalidRequest."""
    names = codings(request.headers.get("Content-Encoding", ""))
    unknown = [name for name in names if name not in ENCODINGS]
    if unknown or len(names) > _MAX_CODINGS:
        shown = repr(unknown[0][:40]) if unknown else "of so many steps"
        raise UnsupportedEncoding(f"Content-Encoding {shown} is not supported; send {', '.join(ENCODINGS)} or none.")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large(max_bytes)
    data = await _read(request, max_bytes)
    if not names and data.startswith(ZSTD_MAGIC):
        names = ["zstd"]  # some clients compress and forget to say so; no JSON begins like that
    for name in reversed(names):
        data = await asyncio.to_thread(decode, data, name, max_bytes)  # few bytes may become very many
    return data


async def _read(request: web.Request, max_bytes: int) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(max_bytes) from None
    except web.RequestPayloadError:
        raise InvalidRequest("The body could not be read: it is cut off, or its compression is damaged.") from None
