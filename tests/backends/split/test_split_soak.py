"""Random traffic over both sides, aborts and deaths at any point: every survivor is right, and nothing stays."""

import os
import random
import time
from dataclasses import dataclass, field

import pytest
from split_doubles import SplitPair, reference

from backends.core.errors import RequestRefused
from backends.protocol.messages import CacheParams, Done, Failed, SamplingParams, TransferMode


@dataclass
class Soak:
    """One random run. Each turn does one small thing, in an order that the seed alone decides."""

    pair: SplitPair
    rng: random.Random
    num_requests: int
    death_rate: float
    asked: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    num_deaths: int = 0

    def run(self) -> None:
        end = time.monotonic() + 60
        while len(self.asked) + len(self.refused) < self.num_requests:
            self.turn()
            assert time.monotonic() < end
        if not self.pair.decode._handoff.connected:
            self.pair.connect()
        self.pair.run()

    def turn(self) -> None:
        pair, rng = self.pair, self.rng
        if rng.random() < self.death_rate:
            self.die()
        dice = rng.random()
        if dice < 0.12:
            self.submit()
        elif dice < 0.16 and self.asked:
            request_id = rng.choice(list(self.asked)[-12:])
            if not pair.ends(request_id):
                self.aborted.add(request_id)
            pair.decode.abort(request_id)
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
        request_id = f"r{len(self.asked) + len(self.refused)}"
        shared = [rng.randrange(1, 40)] * rng.randrange(0, 20)  # prefix hits are common
        tokens = shared + [rng.randrange(1, 40) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.randrange(1, 12)
        cache = CacheParams(
            transfer_mode=rng.choice(["layer", "request", None]), enable_prefix_cache=rng.random() < 0.8
        )
        try:
            self.pair.submit(request_id, tokens, max_tokens, cache=cache, sampling=SamplingParams())
        except RequestRefused as refused:
            self.refused[request_id] = refused.code
        else:
            self.asked[request_id] = (tokens, max_tokens)

    def die(self) -> None:
        """The prefill side dies, or comes back; at times the connection alone is lost, and both pair again."""
        pair = self.pair
        self.num_deaths += 1
        if not pair.decode._handoff.connected:
            pair.connect()
            return
        pair.kill_prefill()
        if self.rng.random() < 0.5:
            pair.connect()

    def check(self) -> dict[str, int]:
        """Every request ended as it must; returns how many of each kind."""
        assert set(self.refused.values()) <= {"peer_lost", "queue_full"}
        counts = {"done": 0, "aborted": 0, "failed": 0}
        for request_id, (tokens, max_tokens) in self.asked.items():
            ends = self.pair.ends(request_id)
            assert len(ends) == (request_id not in self.aborted), (request_id, ends)
            answer = self.pair.tokens(request_id)
            expected = reference(tokens, max_tokens)
            if request_id in self.aborted:
                counts["aborted"] += 1
                assert answer == expected[: len(answer)]
            elif isinstance(ends[0], Done):
                counts["done"] += 1
                assert answer == expected
            else:
                assert isinstance(ends[0], Failed)
                counts["failed"] += 1
                assert ends[0].code == "peer_lost"
                assert answer == []
        return counts


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
    soak = Soak(pair, rng, num_requests=150, death_rate=0.0)
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
    soak = Soak(pair, rng, num_requests=150, death_rate=0.01)
    soak.run()

    counts = soak.check()
    assert soak.num_deaths > 3
    assert counts["done"] > 8
    assert counts["failed"] > 5
    pair.assert_idle()
    pair.close()
    assert num_open_descriptors() == before
