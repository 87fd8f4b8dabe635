"""Random requests to a split fleet, and what must have become of each; what else happens is the test's own."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripted_kv import reference
from split_doubles import SplitFleet

from backends.core.errors import RequestRefused
from backends.protocol.messages import CacheParams, Done, Failed, SamplingParams


@dataclass
class RandomTraffic(ABC):
    """One random run. Each turn does one small thing, in an order that the seed alone decides."""

    fleet: SplitFleet
    rng: random.Random
    num_requests: int
    trouble_rate: float
    asked: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    num_troubles: int = 0

    @abstractmethod
    def turn(self) -> None: ...

    def play(self) -> None:
        """Until all was asked; answers may still be under way."""
        end = time.monotonic() + 60
        while len(self.asked) + len(self.refused) < self.num_requests:
            self.turn()
            assert time.monotonic() < end

    def ask(self, tokens: Sequence[int], max_tokens: int, cache: CacheParams, *, to: int = 0) -> None:
        request_id = f"r{len(self.asked) + len(self.refused)}"
        try:
            self.fleet.submit(request_id, tokens, max_tokens, to=to, cache=cache, sampling=SamplingParams())
        except RequestRefused as refused:
            self.refused.append(refused.code)
        else:
            self.asked[request_id] = (tokens, max_tokens)

    def abort(self) -> None:
        """One of the latest, which may have ended already."""
        request_id = self.rng.choice(list(self.asked)[-12:])
        if not self.fleet.ends(request_id):
            self.aborted.add(request_id)
        for decode in self.fleet.decodes:
            decode.engine.abort(request_id)

    def check(self) -> dict[str, int]:
        """Every request ended as it must; returns how many of each kind."""
        assert set(self.refused) <= {"peer_lost", "queue_full"}
        counts = {"done": 0, "aborted": 0, "failed": 0}
        for request_id, (tokens, max_tokens) in self.asked.items():
            ends = self.fleet.ends(request_id)
            assert len(ends) == (request_id not in self.aborted), (request_id, ends)
            answer, expected = self.fleet.tokens(request_id), reference(tokens, max_tokens)
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
