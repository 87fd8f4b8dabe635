"""Undoes the compression of an upstream that compresses although it was asked not to. Incremental; no I/O."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.codings import DECODERS, FAULTS, codings
from gateway.core.errors import UpstreamGone


class ContentDecoder:
    """Decodes a chain of codings. `supported` says whether every one of them is known."""

    def __init__(self, header: str) -> None:
        names = codings(header)
        self.is_plain = not names
        self.supported = all(name in DECODERS for name in names)
        self._decoders = [DECODERS[name]() for name in reversed(names)] if self.supported else []

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
        except FAULTS:
            raise UpstreamGone("The upstream's answer is compressed and damaged.") from None
