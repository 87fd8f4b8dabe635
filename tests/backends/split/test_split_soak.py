"""Random traffic over both sides, aborts and deaths at any point: every survivor is right, and nothing stays."""

import os
import random
from dataclasses import dataclass

import pytest
from random_traffic import RandomTraffic
from split_doubles import SplitPair
from typing_extensions import override

from backends.protocol.messages import CacheParams, TransferMode


@dataclass
class Soak(RandomTraffic):
    """Over one pair of sides."""

    fleet: SplitPair

    def run(self) -> None:
        self.play()
        if not self.fleet.decode._handoff.connected:
            self.fleet.connect()
        self.fleet.run()

    @override
    def turn(self) -> None:
        pair, rng = self.fleet, self.rng
        if rng.random() < self.trouble_rate:
            self.die()
        dice = rng.random()
        if dice < 0.12:
            self.submit()
        elif dice < 0.16 and self.asked:
            self.abort()
        elif dice < 0.40 and pair.wires and pair.to_prefill:
            pair.prefill.peer_message(pair.peer, pair.to_prefill.popleft())
        elif dice < 0.60 and pair.wires and pair.from_prefill:
            pair.decode.peer_message(pair.peer, pair.from_prefill.popleft())
        elif dice < 0.80:
            pair.prefill.step()
        else:
            pair.decode.step()

    def submit(self) -> None:
        rng = self.rng
        shared = [rng.randrange(1, 40)] * rng.randrange(0, 20)  # prefix hits are common
        tokens = shared + [rng.randrange(1, 40) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 12)
        cache = CacheParams(
            transfer_mode=rng.choice(["layer", "request", None]), enable_prefix_cache=rng.random() < 0.8
        )
        self.ask(tokens, max_tokens, cache)

    def die(self) -> None:
        """The prefill side dies, or comes back; at times the connection alone is lost, and both pair again."""
        pair = self.fleet
        self.num_troubles += 1
        if not pair.decode._handoff.connected:
            pair.connect()
            return
        pair.kill_prefill()
        if self.rng.random() < 0.5:
            pair.connect()


def num_open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("seed", range(12))
def test_random_aborts_leave_nothing_and_spoil_nothing(seed: int):
    rng = random.Random(seed)
    mode: TransferMode = rng.choice(["layer", "request"])
    pair = SplitPair(
        prefill_blocks=rng.choice([14, 24]),
        decode_blocks=rng.choice([15, 30]),
        prefill_seqs=rng.choice([1, 4]),
        decode_seqs=rng.choice([3, 8]),
        chunk=rng.choice([3, 8, 64]),
        max_in_flight=rng.choice([1, 3]),
        transfer_mode=mode,
    )
    pair.connect()
    soak = Soak(pair, rng, num_requests=150, trouble_rate=0.0)
    soak.run()

    counts = soak.check()
    assert counts["done"] > 50
    assert counts["aborted"] > 10
    assert counts["failed"] == 0
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("seed", range(100, 112))
def test_random_deaths_leave_nothing_and_spoil_nothing(seed: int):
    rng = random.Random(seed)
    before = num_open_descriptors()
    pair = SplitPair(prefill_blocks=16, decode_blocks=20, chunk=rng.choice([3, 8]), prefill_seqs=2, max_waiting=8)
    pair.connect()
    soak = Soak(pair, rng, num_requests=150, trouble_rate=0.01)
    soak.run()

    counts = soak.check()
    assert soak.num_troubles > 3
    assert counts["done"] > 8
    assert counts["failed"] > 5
    pair.assert_idle()
    pair.close()
    assert num_open_descriptors() == before
