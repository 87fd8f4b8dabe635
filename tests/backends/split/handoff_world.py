"""What is around a handoff: clients, a pool, prefill sides that behave as they promise. Each rule is an assertion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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
    PrefillDone,
    PrefillFailure,
    PrefillReleased,
    SendCancel,
    SendPrefill,
    StartDecode,
    StopDecode,
    Submitted,
    TimePassed,
)
from backends.engines.split.handoff import Handoff, Phase
from backends.engines.split.peer import PeerId

TIMEOUT_SECONDS = 10.0
Action = tuple[str, *tuple[object, ...]]


@dataclass
class World:
    """`lent[peer]` is what a living process may still write to: nobody may get it before that has answered or died."""

    num_blocks: int = 4
    max_active: int = 2
    max_requests: int = 3
    max_connects: int = 3
    names: tuple[str, ...] = ("p", "q")
    now: float = 0.0
    num_submitted: int = 0
    num_connects: int = 0
    connected: dict[str, PeerId] = field(default_factory=dict)  # living processes
    hung: set[PeerId] = field(default_factory=set)
    lent: dict[PeerId, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    cancelled: set[tuple[PeerId, str]] = field(default_factory=set)
    decoding: dict[str, tuple[int, ...]] = field(default_factory=dict)
    open: dict[str, float] = field(default_factory=dict)  # not ended for the client -> submitted at
    told: set[str] = field(default_factory=set)  # had their first token

    def __post_init__(self) -> None:
        self.handoff = Handoff(max_active=self.max_active, timeout_seconds=TIMEOUT_SECONDS)
        self.free = set(range(self.num_blocks))

    # ------------------------------------------------------------------------------------------ what the machine wants

    def send(self, event: Event) -> None:
        for effect in self.handoff.handle(event):
            self.apply(effect)
        self.check()

    def apply(self, effect: Effect) -> None:
        match effect:
            case SendPrefill(request_id, peer, block_ids):
                assert peer in self.connected.values()
                assert peer not in self.hung
                assert request_id not in self.told
                assert request_id not in self.lent[peer]
                self.lent[peer][request_id] = block_ids
            case SendCancel(request_id, peer):
                assert peer not in self.hung
                assert request_id in self.lent[peer]
                self.cancelled.add((peer, request_id))
            case FreeBlocks(request_id, peer, block_ids):
                assert request_id not in self.lent.get(peer, {}), "freed while a living process may write to them"
                self.give_back(block_ids)
            case StartDecode(request_id, peer, block_ids):
                assert request_id not in self.told, "a first token twice"
                assert request_id not in self.lent[peer]
                self.told.add(request_id)
                self.decoding[request_id] = block_ids
            case StopDecode(request_id):
                self.give_back(self.decoding.pop(request_id))
            case FailRequest(request_id):
                assert request_id not in self.told, "failed after its first token"
                self.end(request_id)

    def give_back(self, block_ids: tuple[int, ...]) -> None:
        assert self.free.isdisjoint(block_ids), "freed twice"
        self.free.update(block_ids)

    def end(self, request_id: str) -> None:
        assert request_id in self.open, "ended twice"
        del self.open[request_id]

    def check(self) -> None:
        held = self.handoff.held_blocks() + [block for blocks in self.decoding.values() for block in blocks]
        assert sorted([*held, *self.free]) == list(range(self.num_blocks)), "a block is lost or owned twice"
        live = (Phase.WAITING, Phase.PREFILLING, Phase.DECODING)
        ids = [f"r{i}" for i in range(self.num_submitted)]
        assert set(self.open) == {i for i in ids if self.handoff.phase(i) in live}
        assert self.handoff.count(Phase.PREFILLING, Phase.DECODING) <= self.max_active
        assert self.handoff.count(Phase.CANCELLING) == len(ids_lent_in_vain(self))
        usable = {peer for peer in self.connected.values() if peer not in self.hung}
        assert set(self.handoff.peers) == usable
        if not usable:
            assert set(self.open) <= self.told, "somebody waits for nobody"
        waiting = [at for request_id, at in self.open.items() if request_id not in self.told]
        assert all(self.now < at + TIMEOUT_SECONDS for at in waiting), "somebody waits beyond the deadline"
        deadline = self.handoff.next_deadline()
        assert deadline == (min(waiting) + TIMEOUT_SECONDS if waiting else None)

    # ------------------------------------------------------------------------------------------------ what may happen

    def actions(self) -> Iterator[Action]:
        if self.num_submitted < self.max_requests:
            yield ("submit",)
        if self.handoff.next_waiting() is not None and len(self.free) >= 2:
            yield from (("reserve", peer) for peer in self.handoff.peers)
        for peer, requests in self.lent.items():
            for request_id in requests:
                yield from (("answer", peer, request_id, kind) for kind in ("done", "failed", "released"))
        yield from (("abort", request_id) for request_id in self.open)
        yield from (("finish", request_id) for request_id in self.decoding)
        yield ("tick",)
        for name in self.names:
            peer = self.connected.get(name)
            if peer is not None:
                yield ("lose", name)
                if peer not in self.hung:
                    yield ("hang", peer)
            elif self.num_connects < self.max_connects:
                yield ("connect", name)

    def act(self, action: Action) -> None:
        getattr(self, action[0])(*action[1:])

    def submit(self) -> None:
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        self.open[request_id] = self.now
        self.send(Submitted(request_id, at=self.now))

    def reserve(self, peer: PeerId) -> None:
        request_id = self.handoff.next_waiting()
        assert request_id is not None
        block_ids = tuple(sorted(self.free)[:2])
        self.free.difference_update(block_ids)
        self.send(BlocksReserved(request_id, peer, block_ids))

    def answer(self, peer: PeerId, request_id: str, kind: str) -> None:
        """Also a hung one may do so: it was stopped and goes on. `Released` comes only after it was asked for."""
        if kind == "released" and (peer, request_id) not in self.cancelled:
            kind = "failed"
        del self.lent[peer][request_id]
        match kind:
            case "done":
                self.send(PrefillDone(request_id, peer))
            case "failed":
                self.send(PrefillFailure(request_id, peer, "internal", "x"))
            case _:
                self.send(PrefillReleased(request_id, peer))

    def abort(self, request_id: str) -> None:
        self.end(request_id)  # the client has left; nothing more may be said to it
        self.send(Aborted(request_id))

    def finish(self, request_id: str) -> None:
        self.give_back(self.decoding.pop(request_id))
        self.end(request_id)
        self.send(DecodeFinished(request_id))

    def tick(self) -> None:
        self.now += 6.0
        self.send(TimePassed(self.now))

    def connect(self, name: str) -> None:
        self.num_connects += 1
        peer = PeerId(name, self.num_connects)
        self.connected[name] = peer
        self.lent[peer] = {}
        self.send(PeerConnected(peer))

    def hang(self, peer: PeerId) -> None:
        self.hung.add(peer)
        self.send(PeerHung(peer, "silent"))

    def lose(self, name: str) -> None:
        peer = self.connected.pop(name)
        del self.lent[peer]
        self.send(PeerLost(peer, "killed"))

    # ------------------------------------------------------------------------------------------------------ the end

    def settle(self) -> None:
        """From any state: once the prefill sides are gone and the answers told, nothing is left."""
        self.now += 1000.0
        self.send(TimePassed(self.now))
        for name in list(self.connected):
            self.lose(name)
        for request_id in list(self.decoding):
            self.finish(request_id)
        assert self.free == set(range(self.num_blocks))
        assert self.open == {}
        assert self.handoff.count(*Phase) == 0
        assert self.handoff.next_deadline() is None

    def fingerprint(self) -> str:
        """Equal for worlds that can't be told apart from now on."""
        phases = [(i, self.handoff.phase(f"r{i}"), self.handoff.peer_of(f"r{i}")) for i in range(self.num_submitted)]
        failovers = [(entry.request_id, entry.num_failovers) for entry in self.handoff._entries.values()]
        ages = [(request_id, self.now - at) for request_id, at in self.open.items()]
        requests = (phases, failovers, ages, self.decoding, sorted(self.told), sorted(self.free))
        return repr((requests, self.lent, sorted(self.cancelled), sorted(self.hung), self.connected, self.num_connects))


def ids_lent_in_vain(world: World) -> list[tuple[PeerId, str]]:
    return [
        (peer, request_id)
        for peer, requests in world.lent.items()
        for request_id in requests
        if world.handoff.peer_of(request_id) != peer
    ]
