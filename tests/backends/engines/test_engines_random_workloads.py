"""Random submits, aborts and steps in tiny pools: every answer is right, every block comes back, nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
from engine_doubles import Harness, PagedRunner, expected_tokens, make_harness
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from backends.engines.base import RequestRefused
from backends.protocol.messages import CacheParams

CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 12),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "max_batched_tokens": st.integers(4, 40),
        "prefill_chunk_tokens": st.integers(1, 40),
        "prefill_token_ratio": st.sampled_from([0.0, 0.3, 1.0]),
        "max_num_seqs": st.integers(1, 6),
        "max_waiting": st.integers(1, 6),
        "digest_bytes": st.sampled_from([1, 32]),
    }
)
CACHES = st.builds(
    CacheParams,
    chunk_size=st.sampled_from([None, 1, 3, 7]),
    enable_prefix_cache=st.sampled_from([True, True, True, False]),
    cache_salt=st.sampled_from(["", "", "a"]),
)


class Workload(RuleBasedStateMachine):
    """Prompts begin with one of three shared texts, so prefixes are hit, evicted and computed again all the time."""

    harness: Harness

    @initialize(config=CONFIGS)
    def start(self, config: dict[str, Any]) -> None:
        config = dict(config)
        num_bytes = config.pop("digest_bytes")
        self.config = config
        self.harness = make_harness(**config, digest=lambda data: bytes([sum(data) % 251] * num_bytes))
        self.alive: list[str] = []
        self.aborted: set[str] = set()
        self.asked: dict[str, tuple[list[int], int]] = {}

    @rule(
        text=st.integers(0, 2),
        num_shared=st.integers(1, 20),
        tail=st.lists(st.integers(0, 2), max_size=3),
        max_tokens=st.integers(1, 40),
        cache=CACHES,
    )
    def submit(self, text: int, num_shared: int, tail: list[int], max_tokens: int, cache: CacheParams) -> None:
        request_id = f"r{len(self.asked)}"
        prompt = [(text * 7 + position) % 11 for position in range(num_shared)] + tail
        num_slots = self.config["num_blocks"] * self.config["block_size"]
        stats = self.harness.engine.stats()
        seats = max(0, self.config["max_num_seqs"] - stats.num_running)
        if len(prompt) + 1 > num_slots or stats.num_waiting >= self.config["max_waiting"] + seats:
            with pytest.raises(RequestRefused, match=r"can never fit|are waiting"):
                self.harness.submit(request_id, prompt, max_tokens=max_tokens, cache=cache)
            return
        self.harness.submit(request_id, prompt, max_tokens=max_tokens, cache=cache)
        self.asked[request_id] = (prompt, max_tokens)
        self.alive.append(request_id)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        if self.alive:
            request_id = self.alive[number % len(self.alive)]
            if self.harness.kinds(request_id)[-1] != "Done":
                self.aborted.add(request_id)
            self.harness.engine.abort(request_id)
            self.harness.scheduler.check_integrity()

    @rule(num_steps=st.integers(1, 15))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            busy = self.harness.engine.num_unfinished() > 0
            assert self.harness.step() == busy, "while there is work every step does some"

    @invariant()
    def the_budget_is_kept(self) -> None:
        if not hasattr(self, "harness"):
            return
        assert isinstance(self.harness.runner, PagedRunner)
        for batch in self.harness.runner.batches:
            assert sum(batch.values()) <= self.config["max_batched_tokens"]
            assert len(batch) <= self.config["max_num_seqs"]
            assert min(batch.values()) >= 1
            prompts = [num_tokens for num_tokens in batch.values() if num_tokens > 1]
            assert sum(prompts) <= self.config["prefill_chunk_tokens"]

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        stats = self.harness.engine.stats()
        assert stats.num_blocks_in_use == 0
        assert stats.num_running == stats.num_waiting == 0
        for request_id in self.alive:
            if request_id not in self.aborted:
                self.check_answer(request_id)

    def check_answer(self, request_id: str) -> None:
        prompt, max_tokens = self.asked[request_id]
        room = self.config["num_blocks"] * self.config["block_size"] + 1 - len(prompt)
        done = self.harness.done(request_id)
        assert done.finish_reason == "length"
        assert self.harness.tokens(request_id) == expected_tokens(prompt, min(max_tokens, room))
        assert done.usage.cached_tokens <= len(prompt) - 1
        assert done.usage.cached_tokens % self.config["block_size"] == 0


Workload.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestRandomWorkloads = Workload.TestCase
