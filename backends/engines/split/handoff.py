"""Which side holds which request and its blocks. A pure state machine: events in, effects out; no sockets, no clock.

                        +-- its prefill side is lost or hung, another one is there --+
                        v                                                            |
    submitted -> WAITING --blocks reserved--> PREFILLING --prefilled--> DECODING --> done
                    |                             |  abort, deadline, no other       |
                    +--> done                     +--> done for its client           +--> done

Blocks named to a prefill side are lent to it until it answers or is gone, whatever becomes of the request: until then
it may still write to them. A request that has ended while blocks are lent for it counts as CANCELLING. So does one
whose prefill side hangs: only the end of that process gives its blocks back.

A request ends for its client exactly once, and leaves a lost side for another one at most `MAX_FAILOVERS` times; its
deadline stays what it was when it came.
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
    PeerHung,
    PeerLost,
    PrefillAnswer,
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
    Unplaceable,
)
from backends.engines.split.peer import PeerId
from backends.protocol.messages import FailureCode

NO_PEER = "No prefill instance is running; it is being restarted. Try again in a few seconds."
MAX_FAILOVERS = 2  # a prompt that ends every process that computes it must not end all of them


class Phase(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    CANCELLING = "cancelling"


@dataclass(slots=True)
class _Entry:
    """A request that has not ended for its client. `peer` is set while it is PREFILLING."""

    request_id: str
    deadline_at: float  # until its prefill must be done
    phase: Phase = Phase.WAITING
    peer: PeerId | None = None
    num_failovers: int = 0

    @property
    def awaits_prefill(self) -> bool:
        return self.phase in (Phase.WAITING, Phase.PREFILLING)


class Handoff:
    """The decode side's book of split requests, in order of arrival, and of blocks that are lent."""

    def __init__(self, *, max_active: int, timeout_seconds: float) -> None:
        self._max_active = max_active  # prefilling or decoding at once
        self._timeout_seconds = timeout_seconds
        self._entries: dict[str, _Entry] = {}
        self._loans: dict[tuple[PeerId, str], tuple[int, ...]] = {}
        self._peers: list[PeerId] = []  # that may be asked

    @property
    def peers(self) -> Sequence[PeerId]:
        """Prefill sides that may be asked, in order of their coming."""
        return tuple(self._peers)

    @property
    def connected(self) -> bool:
        return bool(self._peers)

    def count(self, *phases: Phase) -> int:
        num_lost = 0
        if Phase.CANCELLING in phases:
            num_lost = sum(not self._is_prefilling(request_id, peer) for peer, request_id in self._loans)
        return num_lost + sum(entry.phase in phases for entry in self._entries.values())

    def phase(self, request_id: str) -> Phase | None:
        """None = the id is free."""
        entry = self._entries.get(request_id)
        if entry is not None:
            return entry.phase
        lent = any(request_id == lent_id for _, lent_id in self._loans)
        return Phase.CANCELLING if lent else None

    def peer_of(self, request_id: str) -> PeerId | None:
        """The prefill side whose answer the request waits for."""
        entry = self._entries.get(request_id)
        return entry.peer if entry else None

    def held_blocks(self) -> list[int]:
        """Blocks that a prefill side was lent; of different requests, they may name a shared one more than once."""
        return [block_id for block_ids in self._loans.values() for block_id in block_ids]

    def next_waiting(self) -> str | None:
        """The request to reserve blocks for now; None while nothing waits, or nothing more may start."""
        if not self._peers or self.count(Phase.PREFILLING, Phase.DECODING) >= self._max_active:
            return None
        waiting = (entry.request_id for entry in self._entries.values() if entry.phase is Phase.WAITING)
        return next(waiting, None)

    def next_deadline(self) -> float | None:
        return min((entry.deadline_at for entry in self._entries.values() if entry.awaits_prefill), default=None)

    def handle(self, event: Event) -> Sequence[Effect]:
        """Advance by one event. What is late or unknown is ignored: its request has ended already."""
        match event:
            case TimePassed(now):
                return self._time_passed(now)
            case PeerConnected(peer):
                self._peers.append(peer)
                return ()
            case PeerHung() | PeerLost():
                return self._peer_gone(event)
            case PrefillDone() | PrefillFailure() | PrefillReleased():
                return self._answered(event)
            case _:
                return self._advance(event)

    def _advance(self, event: RequestEvent) -> Sequence[Effect]:
        match event:
            case Submitted():
                return self._submitted(event)
            case BlocksReserved():
                return self._reserved(event)
            case Unplaceable(request_id, code, message):
                return self._unplaceable(request_id, code, message)
            case Aborted(request_id):
                return self._end(request_id)
            case DecodeFinished(request_id):
                return self._decode_finished(request_id)
            case _:
                assert_never(event)

    def _is_prefilling(self, request_id: str, peer: PeerId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.peer == peer

    def _submitted(self, event: Submitted) -> Sequence[Effect]:
        assert self.phase(event.request_id) is None, "request ids are unique"
        if not self._peers:
            return (FailRequest(event.request_id, "peer_lost", NO_PEER),)
        self._entries[event.request_id] = _Entry(event.request_id, event.at + self._timeout_seconds)
        return ()

    def _reserved(self, event: BlocksReserved) -> Sequence[Effect]:
        entry = self._entries.get(event.request_id)
        if entry is None or entry.phase is not Phase.WAITING or event.peer not in self._peers:
            return (FreeBlocks(event.request_id, event.peer, event.block_ids),)
        entry.phase, entry.peer = Phase.PREFILLING, event.peer
        self._loans[event.peer, event.request_id] = event.block_ids
        return (SendPrefill(event.request_id, event.peer, event.block_ids),)

    def _answered(self, event: PrefillAnswer) -> Sequence[Effect]:
        """The prefill side has said its last word on what it was lent."""
        block_ids = self._loans.pop((event.peer, event.request_id), None)
        if block_ids is None:
            return ()
        free = FreeBlocks(event.request_id, event.peer, block_ids)
        if not self._is_prefilling(event.request_id, event.peer):
            return (free,)
        match event:
            case PrefillDone():
                entry = self._entries[event.request_id]
                entry.phase, entry.peer = Phase.DECODING, None
                return (StartDecode(event.request_id, event.peer, block_ids),)
            case PrefillFailure(code=code, message=message):
                return (free, self._fail(event.request_id, code, message))
            case PrefillReleased():
                dropped = "The prefill instance dropped the request."
                return (free, self._fail(event.request_id, "transfer_failed", dropped))
            case _:
                assert_never(event)

    def _unplaceable(self, request_id: str, code: FailureCode, message: str) -> Sequence[Effect]:
        if self.phase(request_id) is not Phase.WAITING:
            return ()
        return (self._fail(request_id, code, message),)

    def _decode_finished(self, request_id: str) -> Sequence[Effect]:
        if self.phase(request_id) is Phase.DECODING:
            del self._entries[request_id]
        return ()

    def _end(self, request_id: str) -> Sequence[Effect]:
        """The client's interest is over. What was lent stays lent."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return ()
        if entry.phase is Phase.DECODING:
            return (StopDecode(request_id),)
        return () if entry.peer is None else (SendCancel(request_id, entry.peer),)

    def _time_passed(self, now: float) -> Sequence[Effect]:
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if entry.awaits_prefill and entry.deadline_at <= now:
                message = self._timeout_message(entry)
                effects += [*self._end(entry.request_id), FailRequest(entry.request_id, "timeout", message)]
        return effects

    def _timeout_message(self, entry: _Entry) -> str:
        doing = "for room on the decode instance" if entry.phase is Phase.WAITING else "for its prefill"
        return (
            f"The request waited {doing} longer than handoff_timeout_seconds = {self._timeout_seconds:g}. "
            "Try again, send fewer requests at once, or raise the limit."
        )

    def _peer_gone(self, event: PeerHung | PeerLost) -> Sequence[Effect]:
        """A lost one gives back what it was lent, and then what waited for it goes elsewhere or ends."""
        effects: list[Effect] = []
        if isinstance(event, PeerLost):
            for peer, request_id in [key for key in self._loans if key[0] == event.peer]:
                effects.append(FreeBlocks(request_id, peer, self._loans.pop((peer, request_id))))
        if event.peer in self._peers:
            self._peers.remove(event.peer)
            effects += self._leave(event)
        return effects

    def _leave(self, event: PeerHung | PeerLost) -> list[Effect]:
        what = "does not answer" if isinstance(event, PeerHung) else "died"
        message = (
            f"The prefill instance {event.peer.name!r} {what} ({event.reason}) and is being restarted. "
            "Try again in a few seconds."
        )
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            if entry.peer == event.peer:
                entry.phase, entry.peer = Phase.WAITING, None
                entry.num_failovers += 1
            if entry.phase is Phase.WAITING and (not self._peers or entry.num_failovers > MAX_FAILOVERS):
                effects.append(self._fail(entry.request_id, "peer_lost", message))
        return effects

    def _fail(self, request_id: str, code: FailureCode, message: str) -> FailRequest:
        del self._entries[request_id]
        return FailRequest(request_id, code, message)
