"""Keeps an upstream's key out of what the upstream answers: some quote it in full when they refuse it. No I/O."""

from __future__ import annotations

_BLOT = b"***"
_SHORTEST = 6  # a shorter key would blot out ordinary words


class KeyBlotter:
    """Replaces the key in bytes as they pass, wherever they are cut. Holds back only what may be its beginning."""

    def __init__(self, key: str) -> None:
        self._key = key.encode() if len(key) >= _SHORTEST else b""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        if not self._key:
            return data
        data = (self._held + data).replace(self._key, _BLOT)
        num_held = self._num_begun(data)
        self._held = data[len(data) - num_held :]
        return data[: len(data) - num_held]

    def text(self, text: str) -> str:
        """The same of what is all there, such as a header."""
        return text.replace(self._key.decode(), _BLOT.decode()) if self._key else text

    def rest(self) -> bytes:
        """What was held back, at the end."""
        held, self._held = self._held, b""
        return held

    def _num_begun(self, data: bytes) -> int:
        """Bytes at the end of `data` with which the key may have begun."""
        longest = min(len(self._key) - 1, len(data))
        return next((num for num in range(longest, 0, -1) if data.endswith(self._key[:num])), 0)
