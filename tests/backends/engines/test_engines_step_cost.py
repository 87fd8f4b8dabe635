"""What the engine's own code does in a step doesn't grow with what was served before. Counted, not timed."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from engine_doubles import Harness, ScriptedRunner, make_harness

NUM_TOKENS = 12
NUM_BLOCKS, BLOCK_SIZE = 4096, 4


class EndlessScript(dict[str, list[int]]):
    """Every request says the same letters."""

    def __missing__(self, request_id: str) -> list[int]:
        return [97] * NUM_TOKENS


@pytest.fixture
def harness() -> Harness:
    return make_harness(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, runner=ScriptedRunner(EndlessScript()))


@pytest.fixture
def names() -> Iterator[str]:
    return (f"r{number}" for number in range(10_000))


def num_operations(call: Callable[[], object]) -> int:
    """Bytecode instructions that Python executes in it; a loop over what is remembered would add to them."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # what is called when rubbish is collected, as by hypothesis, would be counted too
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def serve(harness: Harness, name: str, seed: int) -> None:
    """A prompt that nobody had before: its blocks stay in the prefix cache."""
    randomness = random.Random(seed)
    harness.submit(name, [randomness.randrange(1000) for _ in range(30)], max_tokens=NUM_TOKENS)


def operations_of_a_request(harness: Harness, name: str, seed: int) -> list[int]:
    """Of each of its steps, from admission to its end."""
    serve(harness, name, seed)
    counts = []
    while harness.engine.num_unfinished():
        counts.append(num_operations(harness.engine.step))
    return counts


def test_a_step_costs_the_same_after_hundreds_of_finished_requests(harness: Harness, names: Iterator[str]) -> None:
    seeds = iter(range(10_000))
    for _ in range(3):
        operations_of_a_request(harness, next(names), next(seeds))
    early = operations_of_a_request(harness, next(names), next(seeds))
    for name, seed, _ in zip(names, seeds, range(250), strict=False):
        serve(harness, name, seed)
        harness.run()
    assert harness.scheduler.manager.pool.num_cached_blocks > 1500
    late = operations_of_a_request(harness, next(names), next(seeds))

    # A loop over 250 finished requests or 1,500 blocks would add several times the room that collisions of a dict get.
    assert len(late) == len(early) >= NUM_TOKENS
    assert all(after <= before + 100 for before, after in zip(early, late, strict=True))


def test_a_step_costs_the_same_when_the_cache_is_full_and_blocks_are_taken_from_it(names: Iterator[str]) -> None:
    harness = make_harness(num_blocks=64, block_size=BLOCK_SIZE, runner=ScriptedRunner(EndlessScript()))
    seeds = iter(range(10_000))
    seen: list[list[int]] = []
    for _ in range(60):
        seen.append(operations_of_a_request(harness, next(names), next(seeds)))
    assert harness.scheduler.manager.pool.num_cached_blocks > 50

    assert seen[59] == seen[40]


def test_asking_for_statistics_costs_the_same_too(harness: Harness, names: Iterator[str]) -> None:
    early = num_operations(harness.engine.stats)
    for name, seed in zip(names, range(100), strict=False):
        serve(harness, name, seed)
        harness.run()
    assert num_operations(harness.engine.stats) == early


def test_the_count_would_notice_a_loop_over_what_is_remembered() -> None:
    remembered: list[int] = []

    def look() -> int:
        return sum(value > 0 for value in remembered)

    early = num_operations(look)
    remembered.extend(range(100))
    assert num_operations(look) > early + 100
