"""Real tiny models, two prefill and two decode sides: whole conversations are token for token what merged answers."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from backends.config import EngineConfig
from backends.core.request import Request
from backends.engines.base import Engine, PeerId
from backends.engines.build import build_merged
from backends.engines.split.build import build_decode, build_prefill
from backends.engines.split.decode import DecodeEngine
from backends.engines.split.prefill import PrefillEngine
from backends.protocol.messages import (
    CacheParams,
    Done,
    FromEngine,
    FromPrefill,
    SamplingParams,
    TokenChunk,
    ToPrefill,
)
from support.tiny_model import make_tiny_llama

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
NUM_TOKENS = 10
NUM_TALKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("second-turns"))


def make_config(folder: Path, role: Any, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "role": role,
        "model": str(folder),
        "dtype": "fp32",
        "num_kv_blocks": 96,
        "block_size": 4,
        "num_threads": 1,
        "compiled_rows": 8,
        "max_model_len": 128,
    }
    return EngineConfig(**(values | changes))


class Talker:
    """One engine that takes requests, and what it said."""

    def __init__(self) -> None:
        self.emitted: list[FromEngine] = []
        self.engine: Engine

    def submit(self, request_id: str, tokens: list[int]) -> None:
        self.engine.submit(
            Request(
                request_id=request_id,
                prompt_token_ids=list(tokens),
                max_tokens=NUM_TOKENS,
                eos_token_ids=frozenset({2}),
                sampling=GREEDY,
                cache=CacheParams(),
                seed=0,
                arrived_at=time.monotonic(),
            )
        )

    def tokens(self, request_id: str) -> list[int]:
        chunks = [event for event in self.emitted if isinstance(event, TokenChunk) and event.request_id == request_id]
        return [token for chunk in chunks for token in chunk.token_ids]

    def done(self, request_id: str) -> Done:
        (done,) = [e for e in self.emitted if isinstance(e, Done) and e.request_id == request_id]
        return done


class Wire:
    def __init__(self, decode: DecodeEngine, prefill: PrefillEngine, peer: PeerId) -> None:
        self.decode, self.prefill, self.peer = decode, prefill, peer
        self.to_prefill: deque[ToPrefill] = deque()
        self.from_prefill: deque[FromPrefill] = deque()
        pair, fd = decode.pair_message(), decode.kv_memory_fd
        assert prefill.pair(peer, pair, fd, self.from_prefill.append) is None
        decode.peer_connected(peer, self, prefill.info)

    def send(self, message: ToPrefill) -> None:
        self.to_prefill.append(message)

    def deliver(self) -> bool:
        delivered = bool(self.to_prefill or self.from_prefill)
        while self.to_prefill:
            self.prefill.peer_message(self.peer, self.to_prefill.popleft())
        while self.from_prefill:
            self.decode.peer_message(self.peer, self.from_prefill.popleft())
        return delivered


class ModelFleet:
    """Real engines in this thread, all connected with all."""

    def __init__(self, folder: Path, *, num_prefills: int = 2, num_decodes: int = 2, **config: Any) -> None:
        self.woken = threading.Event()
        self.talkers = [Talker() for _ in range(num_decodes)]
        self.decodes = [build_decode(make_config(folder, "decode", **config), t.emitted.append) for t in self.talkers]
        for talker, built in zip(self.talkers, self.decodes, strict=True):
            talker.engine = built.engine
        prefill = make_config(folder, "prefill", **config)
        self.prefills = [build_prefill(prefill, self.woken.set).engine for _ in range(num_prefills)]
        self.wires = [
            Wire(built.engine, prefill, PeerId(f"{number}", index))
            for index, built in enumerate(self.decodes)
            for number, prefill in enumerate(self.prefills)
        ]

    def run(self) -> None:
        engines = [built.engine for built in self.decodes]
        while any(engine.num_unfinished() for engine in (*engines, *self.prefills)):
            self.woken.clear()
            progressed = [wire.deliver() for wire in self.wires]
            progressed += [engine.step() for engine in (*self.prefills, *engines)]
            if not any(progressed) and not any(wire.to_prefill or wire.from_prefill for wire in self.wires):
                assert self.woken.wait(20)
        assert [engine.stats().num_blocks_in_use for engine in (*engines, *self.prefills)] == [0] * 4

    def close(self) -> None:
        for prefill in self.prefills:
            prefill.close()
        for built in self.decodes:
            built.engine.close()


class Merged(Talker):
    def __init__(self, folder: Path, **config: Any) -> None:
        super().__init__()
        self.engine = build_merged(make_config(folder, "merged", **config), self.emitted.append).engine

    def run(self) -> None:
        while self.engine.num_unfinished():
            assert self.engine.step()


def first_turns(vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    common = [rng.randrange(3, vocab_size) for _ in range(9)]
    lengths = (3, 7, 16, 22)
    return [common + [rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def next_turn(turn: list[int], answer: list[int], number: int) -> list[int]:
    return turn + answer + [5 + number, 9, 11 + number]


@pytest.fixture
def opened() -> Iterator[list[ModelFleet]]:
    fleets: list[ModelFleet] = []
    yield fleets
    for fleet in fleets:
        fleet.close()


CASES = [
    {"transfer_mode": mode, "kv_cache_dtype": dtype, "prefill_chunk_tokens": chunk}
    for mode, dtype, chunk in (
        ("layer", "fp32", 1),
        ("layer", "fp32", 3),
        ("request", "fp32", 4),
        ("layer", "fp32", 512),
        ("layer", "fp16", 5),
        ("request", "fp16", 512),
        ("layer", "bf16", 512),
        ("request", "bf16", 7),
        ("layer", "int8", 6),
        ("request", "int8", 512),
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_pd_07_conversations_over_two_by_two_instances_are_what_merged_answers(
    folder: Path, case: dict[str, Any], opened: list[ModelFleet]
) -> None:
    fleet, merged = ModelFleet(folder, **case), Merged(folder, **case)
    opened.append(fleet)
    turns = first_turns(fleet.decodes[0].engine.info.vocab_size)
    for round_number in range(3):
        for number, turn in enumerate(turns):
            name = f"{round_number}:{number}"
            fleet.talkers[number % 2].submit(name, turn)
            merged.submit(name, turn)
        fleet.run()
        merged.run()
        for number, turn in enumerate(turns):
            name, talker = f"{round_number}:{number}", fleet.talkers[number % 2]
            assert talker.tokens(name) == merged.tokens(name), name
            timings = talker.done(name).timings
            assert timings.decode_held_tokens + timings.transferred_tokens == len(turn)
            assert timings.transfer_bytes == timings.transferred_tokens * fleet.prefills[0].info.kv_bytes_per_token
            if round_number:  # all but what the last answer token and the message add is there
                assert timings.decode_held_tokens >= len(turn) - 4 - 4
        turns = [
            next_turn(turn, merged.tokens(f"{round_number}:{number}"), number) for number, turn in enumerate(turns)
        ]
    assert all(prefill.stats().num_steps for prefill in fleet.prefills)


def test_preemption_and_held_prefixes_change_no_token(folder: Path, opened: list[ModelFleet]) -> None:
    fleet, merged = ModelFleet(folder, num_kv_blocks=21), Merged(folder)
    opened.append(fleet)
    turns = first_turns(fleet.decodes[0].engine.info.vocab_size)
    for round_number in range(2):
        for number, turn in enumerate(turns):
            fleet.talkers[0].submit(f"{round_number}:{number}", turn)
            merged.submit(f"{round_number}:{number}", turn)
        fleet.run()
        merged.run()
    for round_number in range(2):
        for number in range(NUM_TALKS):
            name = f"{round_number}:{number}"
            assert fleet.talkers[0].tokens(name) == merged.tokens(name), name
    stats = fleet.decodes[0].engine.stats()
    assert stats.num_preemptions > 0
    assert stats.decode_held_tokens > 0


def test_a_pair_of_other_backends_is_refused_by_name(folder: Path, opened: list[ModelFleet]) -> None:
    fleet = ModelFleet(folder)
    opened.append(fleet)
    pair = msgspec.structs.replace(fleet.decodes[0].engine.pair_message(), transfer_backend="nixl")

    refusal = fleet.prefills[0].pair(PeerId("x", 99), pair, None, lambda _: None)

    assert refusal is not None
    assert "differ in transfer_backend: decode has 'nixl', prefill has 'local'" in refusal
