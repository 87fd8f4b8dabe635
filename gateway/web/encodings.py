"""Undoes the compression of a request's body, up to a ceiling: what would grow beyond it is given up early. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.codings import DECODERS, FAULTS, Decoder
from gateway.core.errors import BodyTooLarge, InvalidRequest

ENCODINGS = tuple(DECODERS)
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BITE = 16 * 1024  # decoders copy what they leave over of what they are fed, once for each piece and member


def decode(data: bytes, name: str, max_bytes: int) -> bytes:
    """The plain bytes. Raises BodyTooLarge above `max_bytes`, InvalidRequest for damage."""
    decoder = DECODERS[name]()
    try:
        plain = _up_to(max_bytes, _pieces(decoder, data))
    except FAULTS:
        raise InvalidRequest(f"The body is not valid {name}, though its Content-Encoding says so.") from None
    if not decoder.is_whole:
        raise InvalidRequest(f"The {name} body is cut off.")
    return plain


def too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes / 1024**2:g} MiB (limits.max_request_mib).")


def _pieces(decoder: Decoder, data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), _BITE):
        yield from decoder.feed(data[start : start + _BITE])


def _up_to(max_bytes: int, pieces: Iterator[bytes]) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise too_large(max_bytes)
        parts.append(piece)
    return b"".join(parts)
