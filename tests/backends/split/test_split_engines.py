"""Decode and prefill side together: right KV in the right order, and timings that tell of both sides."""

import threading

import pytest
from scripted_kv import BLOCK_SIZE, EOS, NUM_LAYERS, SLOT, next_token, prompt, reference
from split_doubles import WAIT_SECONDS, SplitPair

from backends.protocol.messages import (
    CacheParams,
    Prefill,
    Prefilled,
    SamplingParams,
    TransferMode,
)

BYTES_PER_TOKEN = NUM_LAYERS * 2 * SLOT.size


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
