"""How long a silent peer is believed in, and when to speak so that it believes in us. Pure; no clock, no socket."""

from __future__ import annotations

from dataclasses import dataclass

BEATS_PER_LEASE = 3  # two heartbeats may be late or lost before a peer is taken for hung


@dataclass(slots=True)
class Lease:
    """Of one connection. Whatever the peer says renews it; a peer that says nothing for `seconds` is hung."""

    seconds: float
    heard_at: float
    next_beat_at: float

    @classmethod
    def begin(cls, seconds: float, now: float) -> Lease:
        return cls(seconds, now, now + seconds / BEATS_PER_LEASE)

    def heard(self, now: float) -> None:
        self.heard_at = now

    def is_expired(self, now: float) -> bool:
        return now - self.heard_at >= self.seconds

    def beat_is_due(self, now: float) -> bool:
        """True once for each time that we should say something."""
        if now < self.next_beat_at:
            return False
        self.next_beat_at = now + self.seconds / BEATS_PER_LEASE
        return True

    def next_deadline(self) -> float:
        return min(self.next_beat_at, self.heard_at + self.seconds)
