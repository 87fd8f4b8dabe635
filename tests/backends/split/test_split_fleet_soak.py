"""Random traffic over two prefill and two decode sides, with hangs, deaths and aborts at any point."""

import random
from dataclasses import dataclass

import pytest
from random_traffic import RandomTraffic
from split_doubles import SplitFleet, Wire
from typing_extensions import override

from backends.protocol.messages import CacheParams


@dataclass
class FleetSoak(RandomTraffic):
    def run(self) -> None:
        self.play()
        for number in range(len(self.fleet.prefills)):
            if any(wire.frozen for wire in self.fleet.wires_of(self.fleet.prefills[number])):
                self.fleet.kill_prefill(number)
        self.fleet.connect()
        self.fleet.run()

    @override
    def turn(self) -> None:
        fleet, rng = self.fleet, self.rng
        if rng.random() < self.trouble_rate:
            self.make_trouble()
        if rng.random() < 0.04:
            self.recover()
        dice = rng.random()
        if dice < 0.08:
            self.submit()
        elif dice < 0.10 and self.asked:
            self.abort()
        elif dice < 0.60 and fleet.wires:
            self.deliver_one(rng.choice(fleet.wires))
        elif dice < 0.80:
            side = rng.choice(fleet.prefills)
            if not any(wire.frozen for wire in fleet.wires_of(side)):
                side.engine.step()
        else:
            rng.choice(fleet.decodes).engine.step()
        self.check_integrity()

    def deliver_one(self, wire: Wire) -> None:
        if wire.frozen:
            return
        if wire.to_prefill and self.rng.random() < 0.5:
            wire.prefill.engine.peer_message(wire.peer, wire.to_prefill.popleft())
        elif wire.from_prefill:
            wire.decode.engine.peer_message(wire.peer, wire.from_prefill.popleft())

    def submit(self) -> None:
        rng = self.rng
        if self.asked and rng.random() < 0.4:  # a second turn
            before = rng.choice(list(self.asked))
            tokens = [*self.asked[before][0][:14], *self.fleet.tokens(before), rng.randrange(1, 40)]
        else:
            tokens = [rng.randrange(1, 40)] * rng.randrange(0, 16) + [rng.randrange(1, 40) for _ in range(8)]
        max_tokens = rng.randrange(1, 12)
        cache = CacheParams(transfer_mode=rng.choice(["layer", "request"]), enable_prefix_cache=rng.random() < 0.9)
        self.ask(tokens, max_tokens, cache, to=rng.randrange(2))

    def make_trouble(self) -> None:
        """A prefill side hangs or dies."""
        number = self.rng.randrange(2)
        wires = self.fleet.wires_of(self.fleet.prefills[number])
        if not wires or wires[0].frozen:
            return
        self.num_troubles += 1
        if self.rng.random() < 0.5:
            self.fleet.kill_prefill(number)
        else:
            self.fleet.hang_prefill(number)

    def recover(self) -> None:
        """What hangs is killed, and what died comes back."""
        for number, prefill in enumerate(self.fleet.prefills):
            if any(wire.frozen for wire in self.fleet.wires_of(prefill)):
                self.fleet.kill_prefill(number)
                return
        self.fleet.connect()

    def check_integrity(self) -> None:
        for decode in self.fleet.decodes:
            decode.scheduler.check_integrity()
        for prefill in self.fleet.prefills:
            tables = [request.blocks for request in prefill.scheduler.requests()]
            tables += [work.held for work, _ in prefill.engine._owners.values()]
            prefill.scheduler.manager.pool.check_integrity(tables)


@pytest.mark.parametrize("seed", range(10))
def test_kv_09_no_block_is_lost_or_owned_twice_whatever_hangs_dies_or_is_aborted(seed: int):
    rng = random.Random(seed)
    fleet = SplitFleet(
        num_prefills=2,
        num_decodes=2,
        prefill_blocks=rng.choice([18, 30]),
        decode_blocks=rng.choice([18, 40]),
        prefill_seqs=rng.choice([1, 4]),
        decode_seqs=rng.choice([3, 8]),
        chunk=rng.choice([3, 8, 64]),
        max_waiting=12,
    )
    fleet.connect()
    soak = FleetSoak(fleet, rng, num_requests=200, trouble_rate=0.008)
    soak.run()

    counts = soak.check()
    assert soak.num_troubles > 3
    assert counts["done"] > 20
    fleet.assert_idle()
    fleet.close()
