"""Who is at the other end of one connection. Knows nothing of sockets."""

from __future__ import annotations

from typing import NamedTuple


class PeerId(NamedTuple):
    """One connection to one peer. A peer that comes back under its name is another one: `number` tells them apart."""

    name: str
    number: int
