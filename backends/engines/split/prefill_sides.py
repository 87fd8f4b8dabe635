"""The prefill sides that one decode side is connected to: where to send, what each can hold, what each was lent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backends.core.prefix_hash import BlockHash
from backends.core.request import Request
from backends.core.scheduler_types import Reservation
from backends.engines.base import PeerLink
from backends.engines.split.admission import fits_peer, prefill_message, too_long_for_peers
from backends.engines.split.peer import PeerId
from backends.engines.split.prefill_choice import PrefillChoice
from backends.protocol.messages import CancelPrefill, EngineInfo, TransferMode


@dataclass(frozen=True, slots=True)
class _Side:
    link: PeerLink
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class _Loan:
    """Blocks that a prefill side may write to, and the names of the prompt's full blocks."""

    reservation: Reservation
    hashes: Sequence[BlockHash]


class PrefillSides:
    """Sends to them and remembers what each was asked. Which of them may be asked, the caller says."""

    def __init__(self, *, block_size: int, transfer_mode: TransferMode) -> None:
        """`transfer_mode` is that of requests that name none."""
        self._transfer_mode: TransferMode = transfer_mode
        self._sides: dict[PeerId, _Side] = {}
        self._choice = PrefillChoice(block_size=block_size)
        self._loans: dict[tuple[PeerId, str], _Loan] = {}

    @property
    def num_loans(self) -> int:
        return len(self._loans)

    def add(self, peer: PeerId, link: PeerLink, info: EngineInfo) -> None:
        self._sides[peer] = _Side(link, info)
        self._choice.add(peer, max_blocks=info.num_blocks)

    def forget(self, peer: PeerId) -> None:
        """It is gone; what it was lent was taken back before."""
        self._sides.pop(peer, None)
        self._choice.forget(peer)

    def check_fits(self, request: Request, peers: Sequence[PeerId]) -> None:
        """Raise `RequestRefused` for a prompt that none of these could ever compute."""
        if not self._fitting(request, peers):
            raise too_long_for_peers(request, (self._sides[peer].info for peer in peers))

    def lend(
        self, request: Request, reservation: Reservation, hashes: Sequence[BlockHash], peers: Sequence[PeerId]
    ) -> PeerId:
        """Choose who computes this prompt into these blocks; at least one of the peers must fit it."""
        peer = self._choice.choose(self._fitting(request, peers), hashes)
        self._loans[peer, request.request_id] = _Loan(reservation, hashes)
        return peer

    def ask(self, peer: PeerId, request: Request) -> None:
        """Tell it of the prompt and of the blocks it was lent."""
        loan = self._loans[peer, request.request_id]
        self._choice.asked(peer, request.request_id, loan.hashes, num_tokens=request.num_prompt_tokens)
        self._sides[peer].link.send(prefill_message(request, loan.reservation, default_mode=self._transfer_mode))

    def cancel(self, peer: PeerId, request_id: str) -> None:
        self._sides[peer].link.send(CancelPrefill(request_id=request_id))

    def answered(self, peer: PeerId, request_id: str, *, computed: bool) -> None:
        """It has said its last word on that request. `computed`: its prefix cache holds the prompt now."""
        loan = self._loans.get((peer, request_id))
        self._choice.answered(peer, request_id)
        if computed and loan is not None:
            self._choice.computed(peer, loan.hashes)

    def take_back(self, peer: PeerId, request_id: str) -> Reservation:
        return self._loans.pop((peer, request_id)).reservation

    def _fitting(self, request: Request, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in peers if fits_peer(request, self._sides[peer].info)]
