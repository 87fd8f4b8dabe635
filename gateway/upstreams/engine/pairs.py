"""Every prefill instance with every decode instance: who is connected, and the sockets that connect them.

Knows instances, not requests. When to connect two of them is `pairing`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from backends.protocol.messages import PeerState
from gateway.upstreams.engine.instance import EngineInstance
from gateway.upstreams.engine.pairing import Pairing

logger = logging.getLogger(__name__)
NO_PREFILL = "no prefill side is connected"


@dataclass(frozen=True, slots=True)
class PairReport:
    """One prefill instance with one decode instance, as /ready and /v1/engines show them."""

    prefill: str
    decode: str
    connected: bool
    reason: str  # why it is not; empty if it is
    transfer_backend: str
    same_device: bool | None  # both on one device: split then lowers the memory of none. None = not known yet


@dataclass(slots=True)
class _Pair:
    decode: EngineInstance
    prefill: EngineInstance
    pairing: Pairing

    def pids(self) -> tuple[int, int] | None:
        """Of the two processes; None while one of them is not ready."""
        sides = []
        for side in (self.decode, self.prefill):
            if side.connection is None or side.process is None:
                return None
            sides.append(side.process.pid)
        return sides[0], sides[1]

    def devices(self) -> tuple[str, str] | None:
        infos = (self.decode.report().info, self.prefill.report().info)
        return None if infos[0] is None or infos[1] is None else (infos[0].device, infos[1].device)


class Pairs:
    """All pairs of one split engine. `update` after each change of an instance; `close` at the end."""

    def __init__(
        self, decodes: Sequence[EngineInstance], prefills: Sequence[EngineInstance], *, transfer_backend: str
    ) -> None:
        self._pairs = {
            (decode.name, prefill.name): _Pair(decode, prefill, Pairing()) for decode in decodes for prefill in prefills
        }
        self._prefills = [prefill.name for prefill in prefills]
        self._backend = transfer_backend
        self._timer: asyncio.TimerHandle | None = None

    def connected(self, decode: str) -> bool:
        """Whether this decode instance has any prefill instance."""
        return any(pair.pairing.connected for pair in self._of(decode))

    def reason(self, decode: str) -> str:
        """Why it has none."""
        reasons = dict.fromkeys(
            f"{pair.prefill.name}: {pair.pairing.reason}" if len(self._prefills) > 1 else pair.pairing.reason
            for pair in self._of(decode)
        )
        return "; ".join(reasons) or NO_PREFILL

    def reports(self) -> list[PairReport]:
        return [self._report(pair) for pair in self._pairs.values()]

    def update(self) -> None:
        """Look which processes are up, and connect those that are due."""
        now = asyncio.get_running_loop().time()
        for pair in self._pairs.values():
            pair.pairing.sides(pair.pids(), now)
        self._connect_due()

    def reported(self, decode: str, state: PeerState) -> None:
        """What a decode instance says of its connection to one prefill instance. A hung one is killed."""
        pair = self._named(decode, state.peer)
        if pair is None:
            logger.warning("%s engine: spoke of a prefill side %r, which there is not", decode, state.peer)
            return
        pairing, prefill = pair.pairing, pair.prefill
        is_hung = state.hung and pairing.engaged  # else it is of a process that was replaced
        if state.connected is not pairing.connected or state.reason != pairing.reason:
            news = "connected" if state.connected else f"not connected: {state.reason}"
            logger.info("split engine: %s and %s: %s%s", prefill.name, decode, news, _on_one_device(pair, state))
        pairing.reported(state.connected, state.reason, asyncio.get_running_loop().time())
        if is_hung:
            why = f"it is hung, says {decode}: {state.reason or 'its lease ran out'}"
            logger.warning("%s engine: killing process %s: %s", prefill.name, prefill.report().pid, why)
            prefill.hung(why)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _of(self, decode: str) -> list[_Pair]:
        return [pair for pair in self._pairs.values() if pair.decode.name == decode]

    def _named(self, decode: str, prefill: str) -> _Pair | None:
        """A decode side that has only one prefill side need not name it."""
        name = self._prefills[0] if not prefill and len(self._prefills) == 1 else prefill
        return self._pairs.get((decode, name))

    def _report(self, pair: _Pair) -> PairReport:
        devices = pair.devices()
        return PairReport(
            prefill=pair.prefill.name,
            decode=pair.decode.name,
            connected=pair.pairing.connected,
            reason=pair.pairing.reason,
            transfer_backend=self._backend,
            same_device=None if devices is None else devices[0] == devices[1],
        )

    # ---------------------------------------------------------------------------------------------------- connecting

    def _connect_due(self) -> None:
        loop = asyncio.get_running_loop()
        self.close()
        for pair in self._pairs.values():
            if pair.pairing.due(loop.time()):
                _connect(pair)
        deadlines = [pair.pairing.deadline for pair in self._pairs.values() if pair.pairing.deadline is not None]
        self._timer = loop.call_at(min(deadlines), self._connect_due) if deadlines else None


def _connect(pair: _Pair) -> None:
    """Give each side one end of a fresh connection and the other's name; they introduce themselves over it."""
    decode, prefill = pair.decode.process, pair.prefill.process
    if decode is None or prefill is None:
        return
    one, other = socket.socketpair()
    with one, other:
        decode.send_peer(one, pair.prefill.name)
        prefill.send_peer(other, pair.decode.name)


def _on_one_device(pair: _Pair, state: PeerState) -> str:
    devices = pair.devices()
    if not state.connected or devices is None or devices[0] != devices[1]:
        return ""
    return f", both on {devices[0]}: together they take more of its memory than merged would"
