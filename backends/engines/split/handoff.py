"""Which side holds which request and its blocks. A pure state machine: events in, effects out; no sockets, no clock.

    submitted -> WAITING --blocks reserved--> PREFILLING --prefilled--> DECODING --> done
                    |                             |  abort, deadline        |
                    +--> done                     +--> CANCELLING           +--> done
                                                         | prefilled, failed or released
                                                         +--> done

Blocks named to the prefill side stay held until it answers or is dead: until then it may still write to them. A request
ends for its client exactly once; a CANCELLING one has ended already and only waits for its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from backends.engines.split.events import (
    Aborted,
    BlocksReserved,
    DecodeFinished,
    Effect,
    Event,
    FailRequest,
    FreeBlocks,
    PeerConnected,
    PeerLost,
    PrefillDone,
    PrefillFailure,
    PrefillReleased,
    RequestEvent,
    SendCancel,
    SendPrefill,
    StartDecode,
    StopDecode,
    Submitted,
    TimePassed,
)
from backends.protocol.messages import FailureCode

NO_PEER = "The prefill instance isn't running; it is being restarted. Try again in a few seconds."


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    CANCELLING = "cancelling"


@dataclass(slots=True)
class _Entry:
    request_id: str
    deadline_at: float  # until its prefill must be done
    phase: Phase = Phase.WAITING
    block_ids: tuple[int, ...] = ()

    @property
    def awaits_prefill(self) -> bool:
        return self.phase in (Phase.WAITING, Phase.PREFILLING)


class Handoff:
    """The decode side's book of split requests, in order of arrival."""

    def __init__(self, *, max_active: int, timeout_seconds: float) -> None:
        self._max_active = max_active  # prefilling or decoding at once
        self._timeout_seconds = timeout_seconds
        self._entries: dict[str, _Entry] = {}
        self._connected = False

    @property
    def connected(self) -> bool:
        return self._connected

    def count(self, *phases: Phase) -> int:
        return sum(entry.phase in phases for entry in self._entries.values())

    def phase(self, request_id: str) -> Phase | None:
        entry = self._entries.get(request_id)
        return entry.phase if entry else None

    def held_blocks(self) -> list[int]:
        """Blocks that are neither free nor the scheduler's: reserved, or waiting for the prefill side's last word."""
        return [block_id for entry in self._entries.values() for block_id in entry.block_ids]

    def next_waiting(self) -> str | None:
        """The request to reserve blocks for now; None while nothing waits, or nothing more may start."""
        if not self._connected or self.count(Phase.PREFILLING, Phase.DECODING) >= self._max_active:
            return None
        waiting = (entry.request_id for entry in self._entries.values() if entry.phase is Phase.WAITING)
        return next(waiting, None)

    def next_deadline(self) -> float | None:
        return min((entry.deadline_at for entry in self._entries.values() if entry.awaits_prefill), default=None)

    def handle(self, event: Event) -> Sequence[Effect]:
        """Advance by one event. What is late or unknown is ignored: its request has ended already."""
        match event:
            case Submitted():
                return self._submitted(event)
            case TimePassed(now):
                return self._time_passed(now)
            case PeerConnected():
                self._connected = True
                return ()
            case PeerLost(reason):
                return self._peer_lost(reason)
            case _:
                entry = self._entries.get(event.request_id)
                return self._advance(entry, event) if entry else ()

    def _advance(self, entry: _Entry, event: RequestEvent) -> Sequence[Effect]:
        match event:
            case BlocksReserved(block_ids=block_ids):
                return self._reserved(entry, block_ids)
            case PrefillDone():
                return self._prefill_done(entry)
            case PrefillFailure(code=code, message=message):
                return self._prefill_over(entry, code, message)
            case PrefillReleased():
                return self._prefill_over(entry, "transfer_failed", "The prefill instance dropped the request.")
            case Aborted():
                return self._end(entry)
            case DecodeFinished():
                return self._decode_finished(entry)
            case _:
                assert_never(event)

    def _submitted(self, event: Submitted) -> Sequence[Effect]:
        assert event.request_id not in self._entries, "request ids are unique"
        if not self._connected:
            return (FailRequest(event.request_id, "peer_lost", NO_PEER),)
        self._entries[event.request_id] = _Entry(event.request_id, event.at + self._timeout_seconds)
        return ()

    def _reserved(self, entry: _Entry, block_ids: tuple[int, ...]) -> Sequence[Effect]:
        if entry.phase is not Phase.WAITING or not self._connected:
            return (FreeBlocks(entry.request_id, block_ids),)
        entry.phase, entry.block_ids = Phase.PREFILLING, block_ids
        return (SendPrefill(entry.request_id, block_ids),)

    def _prefill_done(self, entry: _Entry) -> Sequence[Effect]:
        if entry.phase is Phase.CANCELLING:
            return (self._forget(entry),)
        if entry.phase is not Phase.PREFILLING:
            return ()
        entry.phase, block_ids = Phase.DECODING, entry.block_ids
        entry.block_ids = ()
        return (StartDecode(entry.request_id, block_ids),)

    def _prefill_over(self, entry: _Entry, code: FailureCode, message: str) -> Sequence[Effect]:
        """The prefill side holds nothing any more, and the prompt wasn't completed."""
        if entry.phase is Phase.CANCELLING:
            return (self._forget(entry),)
        if entry.phase is not Phase.PREFILLING:
            return ()
        return (self._forget(entry), FailRequest(entry.request_id, code, message))

    def _decode_finished(self, entry: _Entry) -> Sequence[Effect]:
        if entry.phase is Phase.DECODING:
            del self._entries[entry.request_id]
        return ()

    def _end(self, entry: _Entry) -> Sequence[Effect]:
        """The client's interest is over; what it leaves behind depends on who may still touch its blocks."""
        match entry.phase:
            case Phase.WAITING:
                del self._entries[entry.request_id]
                return ()
            case Phase.PREFILLING:
                entry.phase = Phase.CANCELLING
                return (SendCancel(entry.request_id),)
            case Phase.DECODING:
                del self._entries[entry.request_id]
                return (StopDecode(entry.request_id),)
            case Phase.CANCELLING:
                return ()

    def _time_passed(self, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if entry.awaits_prefill and entry.deadline_at <= now:
                message = self._timeout_message(entry)
                effects += [*self._end(entry), FailRequest(entry.request_id, "timeout", message)]
        return effects

    def _timeout_message(self, entry: _Entry) -> str:
        doing = "for room on the decode instance" if entry.phase is Phase.WAITING else "for its prefill"
        return (
            f"The request waited {doing} longer than handoff_timeout_seconds = {self._timeout_seconds:g}. "
            "Try again, send fewer requests at once, or raise the limit."
        )

    def _peer_lost(self, reason: str) -> Sequence[Effect]:
        self._connected = False
        message = f"The prefill instance died ({reason}) and is being restarted. Try again in a few seconds."
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            match entry.phase:
                case Phase.WAITING:
                    del self._entries[entry.request_id]
                    effects.append(FailRequest(entry.request_id, "peer_lost", message))
                case Phase.PREFILLING:
                    effects += [self._forget(entry), FailRequest(entry.request_id, "peer_lost", message)]
                case Phase.CANCELLING:
                    effects.append(self._forget(entry))
                case Phase.DECODING:
                    pass  # holds everything it needs
        return effects

    def _forget(self, entry: _Entry) -> FreeBlocks:
        del self._entries[entry.request_id]
        return FreeBlocks(entry.request_id, entry.block_ids)
