"""What happens to a split request on the decode side, and what must be done about it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from backends.engines.split.peer import PeerId
from backends.protocol.messages import FailureCode

# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """The decode side took `block_ids` for the request that `next_waiting` named, to be filled by `peer`."""

    request_id: str
    peer: PeerId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No connected prefill side could ever compute it."""

    request_id: str
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt's KV is in the reserved blocks and the first token is known."""

    request_id: str
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PrefillFailure:
    request_id: str
    peer: PeerId
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class PrefillReleased:
    request_id: str
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The answer is complete; its blocks were the scheduler's and are free."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    now: float


@dataclass(frozen=True, slots=True)
class PeerConnected:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerHung:
    """Nothing is expected of the prefill side any more, but it may still write to what it was lent."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The prefill side is gone and writes no more."""

    peer: PeerId
    reason: str


PrefillAnswer = PrefillDone | PrefillFailure | PrefillReleased
PeerEvent = PeerConnected | PeerHung | PeerLost
RequestEvent = Submitted | BlocksReserved | Unplaceable | Aborted | DecodeFinished
Event = RequestEvent | PrefillAnswer | TimePassed | PeerEvent

# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class SendPrefill:
    request_id: str
    peer: PeerId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendCancel:
    request_id: str
    peer: PeerId


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """What `peer` was lent for the request."""

    request_id: str
    peer: PeerId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Hand the request and the blocks that `peer` filled to the scheduler."""

    request_id: str
    peer: PeerId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopDecode:
    """Take the request out of the scheduler, which frees its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FailRequest:
    request_id: str
    code: FailureCode
    message: str


Effect = SendPrefill | SendCancel | FreeBlocks | StartDecode | StopDecode | FailRequest
