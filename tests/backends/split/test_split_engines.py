"""Decode and prefill side together: right KV, right order, nothing held afterwards, whatever ends a request."""

import random
import re
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from split_doubles import BLOCK_SIZE, EOS, NUM_LAYERS, SLOT, WAIT_SECONDS, SplitPair, make_info, next_token, reference

from backends.core.errors import RequestRefused
from backends.core.scheduler_types import SchedulerOutput
from backends.engines.base import PeerId
from backends.engines.split.handoff import Phase
from backends.protocol.messages import (
    Accepted,
    CacheParams,
    CancelPrefill,
    EngineInfo,
    Prefill,
    Prefilled,
    PrefillFailed,
    PrefillStarted,
    Released,
    SamplingParams,
    TransferMode,
)

MODES: list[TransferMode] = ["layer", "request"]
PEER = PeerId("another", 99)
BYTES_PER_TOKEN = NUM_LAYERS * 2 * SLOT.size


def prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 40) for _ in range(num_tokens)]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> TransferMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair() -> Iterator[SplitPair]:
    made = SplitPair()
    made.connect()
    yield made
    made.close()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 31, 32])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_the_answer_is_the_references_for_every_prompt_and_chunk_length(
    num_tokens: int, chunk: int, mode: TransferMode
):
    pair = SplitPair(chunk=chunk, transfer_mode=mode)
    pair.connect()
    pair.submit("a", prompt(num_tokens), 6)
    pair.run()

    assert pair.tokens("a") == reference(prompt(num_tokens), 6, ignore_eos=True)
    assert pair.done("a").timings.transfer_bytes == num_tokens * BYTES_PER_TOKEN
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("shared", [3, 4, 9, 16, 20])
def test_prefix_hits_are_copied_too(shared: int, mode: TransferMode):
    pair = SplitPair(chunk=3, transfer_mode=mode)
    pair.connect()
    first, second = prompt(20), prompt(20)[:shared] + prompt(7, seed=1)
    pair.submit("a", first, 2)
    pair.run()
    pair.decode.reset_peaks(clear_prefix_cache=True)  # or it would hold a part already
    pair.submit("b", second, 6)
    pair.run()

    done = pair.done("b")
    assert pair.tokens("b") == reference(second, 6, ignore_eos=True)
    assert done.usage.cached_tokens == shared // BLOCK_SIZE * BLOCK_SIZE
    assert done.timings.transfer_bytes == len(second) * BYTES_PER_TOKEN
    pair.assert_idle()
    pair.close()


def test_pd_11_transferred_kv_is_no_prefix_hit(pair: SplitPair):
    pair.submit("a", prompt(20), 8)
    pair.run()

    assert pair.done("a").usage.cached_tokens == 0
    assert pair.decode.stats().prefix_hit_tokens == 0
    assert pair.prefill.stats().prefix_query_tokens == 20


def test_many_requests_share_both_sides(mode: TransferMode):
    pair = SplitPair(chunk=5, transfer_mode=mode, prefill_seqs=3, decode_seqs=4, max_in_flight=1)
    pair.connect()
    prompts = {f"r{i}": prompt(5 + 3 * i, seed=i % 4) for i in range(9)}
    for request_id, tokens in prompts.items():
        pair.submit(request_id, tokens, 5)
    pair.run()

    for request_id, tokens in prompts.items():
        assert pair.tokens(request_id) == reference(tokens, 5, ignore_eos=True), request_id
    pair.assert_idle()
    pair.close()


def test_requests_wait_while_the_decode_side_has_no_blocks_or_no_place():
    pair = SplitPair(decode_blocks=8, decode_seqs=2)
    pair.connect()
    for request_id in "abc":
        pair.submit(request_id, prompt(12), 3)

    asked = [message.request_id for message in pair.to_prefill if isinstance(message, Prefill)]
    assert asked == ["a", "b"]
    pair.run()
    assert all(pair.tokens(i) == reference(prompt(12), 3, ignore_eos=True) for i in "abc")
    pair.assert_idle()
    pair.close()


def prefill_alone(pair: SplitPair, num_prompts: int) -> None:
    """Compute and copy all prompts; the decode side hears of it afterwards."""
    pair.deliver()
    while sum(isinstance(message, Prefilled) for message in pair.from_prefill) < num_prompts:
        pair.woken.clear()
        if not pair.prefill.step():
            assert pair.woken.wait(WAIT_SECONDS), "the copies don't end"


def test_a_preempted_answer_is_computed_again_on_the_decode_side():
    pair = SplitPair(decode_blocks=9, prefill_blocks=16)
    pair.connect()
    for seed, request_id in enumerate("abc"):
        pair.submit(request_id, prompt(4, seed=seed), 20)
    prefill_alone(pair, 3)  # so that all decode at once, however late the copying threads are
    pair.run()

    for seed, request_id in enumerate("abc"):
        assert pair.tokens(request_id) == reference(prompt(4, seed=seed), 20, ignore_eos=True)
    assert pair.decode.stats().num_preemptions > 0
    assert sum(pair.done(i).timings.num_preemptions for i in "abc") > 0
    pair.assert_idle()
    pair.close()


def test_one_token_may_be_the_whole_answer(pair: SplitPair):
    stop = f"{next_token(prompt(5))},"
    pair.submit("length", prompt(5), 1)
    pair.submit("string", prompt(5), 9, sampling=SamplingParams(stop=(stop,)))
    pair.submit("token", prompt(5), 9, sampling=SamplingParams(stop_token_ids=(next_token(prompt(5)),)))
    pair.run()

    assert [pair.done(i).finish_reason for i in ("length", "string", "token")] == ["length", "stop", "stop"]
    assert pair.done("string").stop_reason == stop
    assert pair.decode.stats().num_steps == 0
    assert pair.done("length").timings.decode_wait_seconds == 0.0
    pair.assert_idle()


def test_the_end_mark_ends_an_answer_on_either_side(pair: SplitPair):
    ends_at_once = next(p for s in range(999) if next_token(p := prompt(6, seed=s)) == EOS)
    ends_later = next(p for s in range(999) if len(reference(p := prompt(6, seed=s), 20)) in range(3, 20))
    pair.submit("once", ends_at_once, 20, sampling=SamplingParams())
    pair.submit("later", ends_later, 20, sampling=SamplingParams())
    pair.run()

    assert pair.tokens("once") == [EOS]
    assert pair.tokens("later") == reference(ends_later, 20)
    assert pair.done("once").finish_reason == pair.done("later").finish_reason == "stop"
    pair.assert_idle()


def test_prefill_is_told_what_it_needs_to_sample_alike(pair: SplitPair):
    sampling = SamplingParams(temperature=0.7, min_tokens=3)
    pair.submit("a", prompt(5), sampling=sampling, cache=CacheParams(chunk_size=64, transfer_mode="request"))

    (message,) = pair.to_prefill
    assert isinstance(message, Prefill)
    assert (message.seed, message.sampling, message.eos_token_ids) == (1, sampling, [EOS])
    assert message.cache.chunk_size is None
    assert message.transfer_mode == "request"
    pair.run()


def test_timings_tell_both_sides(pair: SplitPair):
    pair.submit("a", prompt(20), 4)
    pair.run()

    timings = pair.done("a").timings
    assert timings.peak_kv_blocks == {"prefill": 5, "decode": 6}
    assert timings.peak_memory_bytes == {"prefill": 2, "decode": 3}
    assert 0.0 < timings.transfer_overlapped_seconds <= timings.transfer_seconds
    assert min(timings.queue_seconds, timings.prefill_seconds, timings.decode_wait_seconds) >= 0.0
    assert timings.decode_seconds > 0.0
    assert pair.prefill.stats().transferred_bytes == timings.transfer_bytes


def test_layers_are_copied_while_the_next_are_computed():
    """Layer 2 isn't computed before a copy of layer 0 has run: with no overlap this would never end."""
    pair = SplitPair()
    copied = threading.Event()
    pair.before_copy = copied.set
    waited: list[bool] = []

    def before_layer(layer: int) -> None:
        if layer == 2:
            waited.append(copied.wait(WAIT_SECONDS))

    pair.prefill_runner.before_layer = before_layer
    pair.connect()
    pair.submit("a", prompt(6), 2)
    pair.run()

    assert waited == [True]
    assert pair.done("a").timings.transfer_overlapped_seconds > 0.0
    pair.close()


def test_request_mode_copies_only_what_is_whole():
    pair = SplitPair(transfer_mode="request")
    copied = threading.Event()
    pair.before_copy = copied.set
    seen: list[bool] = []
    pair.prefill_runner.before_layer = lambda _: seen.append(copied.is_set())
    pair.connect()
    pair.submit("a", prompt(6), 2)
    pair.run()

    assert seen == [False] * NUM_LAYERS
    assert pair.done("a").timings.transfer_overlapped_seconds == 0.0
    assert pair.done("a").timings.transfer_seconds > 0.0
    pair.close()


# aborts and deaths in each state


class Gate:
    """Copies stop here until it is opened."""

    def __init__(self, pair: SplitPair) -> None:
        self._pair = pair
        self.reached = threading.Event()
        self._open = threading.Event()
        pair.before_copy = self._pass

    def _pass(self) -> None:
        self.reached.set()
        assert self._open.wait(WAIT_SECONDS)

    def open(self) -> None:
        self._open.set()


STATES = ["waiting", "sent", "queued on prefill", "between chunks", "copying", "answered", "decoding"]


def bring_to(state: str) -> tuple[SplitPair, Gate | None]:
    """A pair whose request "a" is in `state`."""
    pair = SplitPair(decode_seqs=1 if state == "waiting" else 8, chunk=4, transfer_mode="request")
    gate = Gate(pair) if state == "copying" else None
    pair.connect()
    if state == "waiting":
        pair.submit("z", prompt(6), 4)
    pair.submit("a", prompt(11), 8)
    if state in STATES[2:]:
        pair.deliver()
    if state == "between chunks":
        assert pair.prefill.step()
    if gate is not None:
        while not gate.reached.is_set():
            pair.prefill.step()
    if state in ("answered", "decoding"):
        while not any(isinstance(message, Prefilled) for message in pair.from_prefill):
            pair.prefill.step()
    if state == "decoding":
        pair.deliver()
        pair.decode.step()
    expected = {"waiting": Phase.WAITING, "decoding": Phase.DECODING}.get(state, Phase.PREFILLING)
    assert pair.decode._handoff.phase("a") is expected
    return pair, gate


def open_soon(gate: Gate | None) -> None:
    if gate is not None:
        gate.open()


@pytest.mark.parametrize("state", STATES)
def test_pd_04_an_abort_leaves_nothing_behind(state: str):
    pair, gate = bring_to(state)
    told = len(pair.emitted)

    pair.decode.abort("a")
    pair.decode.abort("a")  # and once more does nothing
    cancelling = pair.decode._handoff.phase("a") is Phase.CANCELLING
    assert cancelling is (state not in ("waiting", "decoding"))  # the prefill side may still write to its blocks
    open_soon(gate)
    pair.run()

    assert [event for event in pair.emitted[told:] if getattr(event, "request_id", "") == "a"] == []
    pair.assert_idle()
    pair.submit("b", prompt(9), 3)
    pair.run()
    assert pair.tokens("b") == reference(prompt(9), 3, ignore_eos=True)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", STATES)
def test_pd_04_the_death_of_the_prefill_side_fails_what_needs_it(state: str):
    pair, gate = bring_to(state)

    open_soon(gate)
    pair.kill_prefill()
    pair.run()

    if state == "decoding":
        assert pair.tokens("a") == reference(prompt(11), 8, ignore_eos=True)
    else:
        failed = pair.failed("a")
        assert failed.code == "peer_lost"
        assert "killed by signal 9" in failed.message
        assert "is being restarted" in failed.message
    pair.assert_idle()
    with pytest.raises(RequestRefused, match="restarted") as refused:
        pair.submit("b", prompt(9), 3)
    assert refused.value.code == "peer_lost"

    pair.connect()
    pair.submit("b", prompt(9), 3)
    pair.run()
    assert pair.tokens("b") == reference(prompt(9), 3, ignore_eos=True)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", STATES)
def test_pd_04_the_death_of_the_decode_side_leaves_the_prefill_side_clean(state: str):
    pair, gate = bring_to(state)

    open_soon(gate)
    pair.kill_decode()

    assert pair.prefill.num_unfinished() == 0
    assert pair.prefill.stats().num_blocks_in_use == 0
    pair.prefill_scheduler.check_integrity()
    assert not pair.prefill.step()
    pair.prefill.peer_message(PEER, CancelPrefill(request_id="a"))  # too late to matter
    pair.close()


@pytest.mark.parametrize("state", STATES[:-1])
def test_the_handoff_timeout_fails_a_request_before_its_first_token(state: str):
    pair, gate = bring_to(state)

    assert pair.decode.next_deadline() is not None
    pair.now += 101.0
    pair.decode.step()
    open_soon(gate)
    pair.run()

    failed = pair.failed("a")
    assert failed.code == "timeout"
    assert "handoff_timeout_seconds = 100" in failed.message
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", STATES)
def test_a_requests_own_deadline_counts_in_every_state(state: str):
    pair, gate = bring_to(state)
    pair.decode.abort("a")
    open_soon(gate)
    pair.run()
    pair.submit("b", prompt(9), 8, deadline_seconds=5.0)
    if state == "decoding":
        pair.run_until(lambda: pair.decode._handoff.phase("b") is Phase.DECODING)

    pair.now += 6.0
    pair.decode.step()
    pair.run()

    assert pair.failed("b").code == "timeout"
    pair.assert_idle()
    pair.close()


def test_pd_01_a_step_that_fails_on_the_prefill_side_costs_its_requests_alone(pair: SplitPair):
    pair.prefill_runner.fail_next = RuntimeError("out of memory")
    pair.submit("a", prompt(9), 4)
    pair.run()
    pair.submit("b", prompt(9), 4)
    pair.run()

    assert pair.failed("a").code == "internal"
    assert "out of memory" in pair.failed("a").message
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()


def test_blocks_are_not_reused_while_a_copy_out_of_them_runs():
    pair = SplitPair(chunk=4, max_in_flight=4)
    gate = Gate(pair)
    pair.connect()
    pair.submit("a", prompt(9), 4)
    pair.deliver()
    assert pair.prefill.step()  # three layers of the first chunk wait at the gate
    assert gate.reached.wait(WAIT_SECONDS)
    request = next(pair.prefill_scheduler.requests())

    preempted = SchedulerOutput((), preempted=(request,))
    assert_waits_for(gate, lambda: pair.prefill._before_compute(preempted))
    pair.run()
    assert pair.tokens("a") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()
    pair.close()


def test_a_failed_step_is_answered_only_after_its_copies_have_ended():
    pair = SplitPair(max_in_flight=1)
    gate = Gate(pair)
    pair.connect()
    pair.prefill_runner.fail_next = RuntimeError("out of memory")
    pair.prefill_runner.before_layer = lambda layer: layer == 0 or gate.reached.wait(WAIT_SECONDS)  # layer 0 is copied
    pair.submit("a", prompt(9), 4)
    pair.deliver()

    assert_waits_for(gate, pair.prefill.step)
    pair.run()
    assert pair.failed("a").code == "internal"
    pair.assert_idle()
    pair.close()


def assert_waits_for(gate: Gate, call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert gate.reached.wait(WAIT_SECONDS)
    thread.join(0.05)
    assert thread.is_alive()
    gate.open()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_a_step_that_fails_on_the_decode_side_costs_its_requests_alone(pair: SplitPair):
    pair.submit("a", prompt(9), 4)
    pair.run_until(lambda: bool(pair.tokens("a")))
    pair.decode_runner.fail_next = RuntimeError("out of memory")
    pair.run()
    pair.submit("b", prompt(9), 4)
    pair.run()

    assert pair.failed("a").code == "internal"
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()


def test_a_copy_that_fails_fails_its_request_by_name(mode: TransferMode):
    pair = SplitPair(transfer_mode=mode, chunk=4)
    pair.connect()

    def break_down() -> None:
        raise OSError("the memory is gone")

    pair.before_copy = break_down
    pair.submit("a", prompt(9), 4)
    pair.run()
    assert pair.failed("a").code == "transfer_failed"
    assert "the memory is gone" in pair.failed("a").message
    pair.before_copy = lambda: None
    pair.submit("b", prompt(9), 4)
    pair.run()
    assert pair.tokens("b") == reference(prompt(9), 4, ignore_eos=True)
    pair.assert_idle()
    pair.close()


# refusals


def test_a_request_is_accepted_before_anything_else_is_said(pair: SplitPair):
    pair.submit("a", prompt(9), 4)

    assert pair.emitted == [Accepted(request_id="a", prompt_tokens=9, max_tokens=4)]
    pair.run()


def test_a_full_queue_refuses():
    pair = SplitPair(decode_seqs=1, max_waiting=2)
    pair.connect()
    for request_id in "abc":
        pair.submit(request_id, prompt(5))
    with pytest.raises(RequestRefused, match="2 requests are waiting") as refused:
        pair.submit("d", prompt(5))
    assert refused.value.code == "queue_full"
    pair.run()
    assert pair.ends("d") == []
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(32, 4), (4, 32)])
def test_a_prompt_that_fits_neither_pool_is_refused_at_once(prefill_blocks: int, decode_blocks: int):
    pair = SplitPair(prefill_blocks=prefill_blocks, decode_blocks=decode_blocks)
    pair.connect()
    with pytest.raises(RequestRefused, match="pool of 16 tokens") as refused:
        pair.submit("a", prompt(16))
    assert refused.value.code == "kv_pool_too_small"
    pair.submit("b", prompt(15), 2)
    pair.run()
    assert pair.tokens("b")[:1] == reference(prompt(15), 1, ignore_eos=True)
    pair.assert_idle()
    pair.close()


def test_one_request_id_is_one_request(pair: SplitPair):
    pair.submit("a", prompt(5))
    with pytest.raises(RequestRefused, match="in use"):
        pair.submit("a", prompt(5))
    pair.deliver()
    pair.decode.abort("a")
    with pytest.raises(RequestRefused, match="in use"):  # its blocks are still with the prefill side
        pair.submit("a", prompt(5))
    pair.run()
    pair.submit("a", prompt(5), 2)
    pair.run()
    assert pair.tokens("a") == reference(prompt(5), 2, ignore_eos=True)


@pytest.mark.parametrize("block_ids", [[0], [0, 0], [0, 32], [-1, 0]])
def test_block_ids_that_cannot_be_right_are_refused(pair: SplitPair, block_ids: list[int]):
    pair.prefill.peer_message(
        pair.peer,
        Prefill(
            request_id="a",
            token_ids=prompt(5),
            block_ids=block_ids,
            sampling=SamplingParams(),
            cache=CacheParams(),
            transfer_mode="layer",
            seed=1,
        ),
    )

    (answer,) = pair.from_prefill
    assert isinstance(answer, PrefillFailed)
    assert answer.code == "internal"
    assert pair.prefill.num_unfinished() == 0
    pair.from_prefill.clear()


def test_prefill_says_when_it_starts_and_that_it_let_go(pair: SplitPair):
    pair.submit("a", prompt(30))
    pair.deliver()
    assert pair.prefill.step()
    assert isinstance(pair.from_prefill[0], PrefillStarted)
    pair.from_prefill.clear()
    pair.submit("b", prompt(30))
    pair.deliver()
    pair.decode.abort("b")
    while pair.to_prefill:
        pair.prefill.peer_message(pair.peer, pair.to_prefill.popleft())

    assert Released(request_id="b") in pair.from_prefill
    pair.kill_prefill()
    pair.assert_idle()


DIFFERENT = [
    ({"model_fingerprint": "weights-2"}, r"differ in model: decode has 'weights-2', prefill has 'weights-1'"),
    ({"block_size": 8}, r"differ in block_size: decode has 8, prefill has 4"),
    ({"kv_cache_dtype": "bf16"}, r"differ in kv_cache_dtype: decode has 'bf16', prefill has 'fp32'"),
    ({"weight_dtype": "int8"}, r"differ in weight_dtype: decode has 'int8', prefill has 'fp32'"),
    ({"kv_bytes_per_token": 12}, r"differ in KV bytes per token: decode has 12, prefill has 48"),
    ({"num_blocks": 31}, r"announced \d+ bytes of KV memory; its 31 blocks of 4 tokens need 5952"),
]


def refusal_of(pair: SplitPair, **changes: object) -> str | None:
    message = msgspec.structs.replace(pair.decode.pair_message(), **changes)
    return pair.prefill.pair(PEER, message, pair.memory.fd, lambda _: None)


@pytest.mark.parametrize(("changes", "reason"), DIFFERENT)
def test_sides_that_differ_do_not_pair(pair: SplitPair, changes: dict[str, object], reason: str):
    pair.kill_prefill()
    info: EngineInfo = make_info("decode", **{"num_blocks": 32, **changes})  # type: ignore[arg-type]

    refusal = refusal_of(pair, info=info)

    assert refusal is not None
    assert re.search(reason, refusal)
    pair.connect()


def test_sides_of_different_versions_do_not_pair(pair: SplitPair):
    pair.kill_prefill()

    refusal = refusal_of(pair, protocol_version=99)

    assert refusal is not None
    assert re.search(r"differ in protocol version: decode has 99, prefill has \d+\.", refusal)


def test_kv_memory_that_cannot_be_mapped_is_refused(pair: SplitPair):
    pair.kill_prefill()

    with open("/dev/null", "rb") as nothing:
        refusal = pair.prefill.pair(PEER, pair.decode.pair_message(), nothing.fileno(), lambda _: None)

    assert refusal is not None
    assert "can't be mapped" in refusal
