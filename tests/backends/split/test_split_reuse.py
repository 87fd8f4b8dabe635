"""What the decode side holds already: found, kept from harm, and not transferred again."""

import pytest
from scripted_kv import BLOCK_SIZE, NUM_LAYERS, SLOT, expected, prompt
from split_doubles import SplitPair

from backends.protocol.messages import CacheParams, Prefill, PrefillFailed, SamplingParams, TransferMode

BYTES_PER_TOKEN = NUM_LAYERS * 2 * SLOT.size


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize("shared", [0, 3, 4, 9, 16, 20])
def test_what_the_decode_side_holds_is_not_transferred(shared: int, chunk: int, mode: TransferMode):
    pair = SplitPair(chunk=chunk, transfer_mode=mode)
    pair.connect()
    second = prompt(20)[:shared] + prompt(7, seed=1)
    pair.submit("a", prompt(20), 2)
    pair.run()
    pair.submit("b", second, 6)
    pair.run()

    timings = pair.done("b").timings
    held = shared // BLOCK_SIZE * BLOCK_SIZE
    assert pair.tokens("b") == expected(second, 6)
    assert (timings.decode_held_tokens, timings.transferred_tokens) == (held, len(second) - held)
    assert timings.transfer_bytes == timings.transferred_tokens * BYTES_PER_TOKEN
    assert (timings.prefill_hit_tokens, timings.computed_tokens) == (held, len(second) - held)
    assert pair.decode.stats().decode_held_tokens == held
    assert pair.decode.stats().transferred_tokens == 20 + len(second) - held
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16])
def test_the_same_prompt_again_moves_only_its_last_partial_block(num_tokens: int):
    pair = SplitPair()
    pair.connect()
    for request_id in "ab":
        pair.submit(request_id, prompt(num_tokens), 6)
        pair.run()
        assert pair.tokens(request_id) == expected(prompt(num_tokens), 6)

    assert pair.done("b").timings.transferred_tokens == num_tokens % BLOCK_SIZE
    pair.assert_idle()
    pair.close()


def test_a_second_turn_of_4096_tokens_moves_less_than_five_percent_of_the_firsts_bytes():
    pair = SplitPair(prefill_blocks=1200, decode_blocks=1200)
    pair.connect()
    first = prompt(4096)
    pair.submit("first", first, 40)
    pair.run()
    second = first + pair.tokens("first") + prompt(100, seed=2)
    pair.submit("second", second, 5)
    pair.run()

    bytes_of_first = pair.done("first").timings.transfer_bytes
    timings = pair.done("second").timings
    assert bytes_of_first == 4096 * BYTES_PER_TOKEN
    assert timings.transfer_bytes < 0.05 * bytes_of_first
    assert timings.decode_held_tokens >= 4096 + 39 - BLOCK_SIZE  # the last answer token was never computed
    assert timings.prefill_hit_tokens == 4096  # the answer is new to the prefill side
    assert pair.done("second").usage.cached_tokens == 4096
    assert pair.tokens("second") == expected(second, 5)
    pair.assert_idle()
    pair.close()


def test_held_blocks_are_shared_by_running_requests_and_outlive_either():
    pair = SplitPair(decode_blocks=14)
    pair.connect()
    pair.submit("a", prompt(16), 12)
    pair.run_until(lambda: len(pair.tokens("a")) > 2)
    pair.submit("b", [*prompt(16), 7], 12)
    pair.run_until(lambda: len(pair.tokens("b")) > 2)
    assert pair.decode.stats().num_blocks_in_use < 2 * 5
    pair.decode.abort("a")
    pair.decode_scheduler.check_integrity()
    pair.submit("c", [*prompt(16), 8], 12)
    pair.run()

    for request_id, last in (("b", 7), ("c", 8)):
        assert pair.tokens(request_id) == expected([*prompt(16), last], 12)
        assert pair.done(request_id).timings.decode_held_tokens == 16
    pair.assert_idle()
    pair.close()


def test_held_blocks_stay_while_the_prefill_side_works_and_others_need_room():
    """The first request is over and its blocks are free for all; the second has reserved them."""
    pair = SplitPair(decode_blocks=10, chunk=4)
    pair.connect()
    pair.submit("a", prompt(16), 2)
    pair.run()
    pair.submit("b", prompt(16) + prompt(4, seed=3), 4)
    assert pair.decode.stats().num_blocks_in_use == 5
    pair.submit("c", prompt(16, seed=4), 4)
    pair.submit("d", prompt(16, seed=5), 4)
    pair.run()

    assert pair.done("b").timings.decode_held_tokens == 16
    assert pair.tokens("b") == expected(prompt(16) + prompt(4, seed=3), 4)
    assert pair.tokens("d") == expected(prompt(16, seed=5), 4)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("state", ["sent", "between chunks", "decoding"])
def test_pd_04_an_abort_gives_shared_blocks_back_once(state: str):
    pair = SplitPair(chunk=4, transfer_mode="request")
    pair.connect()
    pair.submit("a", prompt(16), 20)
    pair.run_until(lambda: bool(pair.tokens("a")))
    pair.submit("b", prompt(16) + prompt(9, seed=3), 20)
    if state == "between chunks":
        pair.deliver()
        pair.prefill.step()
    if state == "decoding":
        pair.run_until(lambda: bool(pair.tokens("b")))
    pair.decode.abort("b")
    pair.decode_scheduler.check_integrity()
    pair.run()

    assert pair.tokens("a") == expected(prompt(16), 20)
    pair.assert_idle()
    pair.close()


def test_a_lost_prefill_side_gives_shared_blocks_back_once():
    pair = SplitPair(chunk=4)
    pair.connect()
    pair.submit("a", prompt(16), 20)
    pair.run_until(lambda: bool(pair.tokens("a")))
    pair.submit("b", prompt(16) + prompt(9, seed=3), 20)
    pair.deliver()
    pair.kill_prefill()
    pair.run()

    assert pair.failed("b").code == "peer_lost"
    assert pair.tokens("a") == expected(prompt(16), 20)
    pair.assert_idle()
    pair.close()


def test_a_preempted_answer_whose_prefix_was_held_is_computed_again():
    pair = SplitPair(decode_blocks=11, prefill_blocks=32)
    pair.connect()
    for request_id in "ab":
        pair.submit(request_id, prompt(12) + prompt(3, seed=ord(request_id)), 18)
    pair.run()

    assert pair.decode.stats().num_preemptions > 0
    for request_id in "ab":
        assert pair.tokens(request_id) == expected(prompt(12) + prompt(3, seed=ord(request_id)), 18)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize(
    ("cache", "sampling"),
    [
        (CacheParams(enable_prefix_cache=False), SamplingParams(ignore_eos=True)),
        (CacheParams(cache_salt="mine"), SamplingParams(ignore_eos=True)),
    ],
)
def test_a_request_that_shares_nothing_holds_nothing(cache: CacheParams, sampling: SamplingParams):
    pair = SplitPair()
    pair.connect()
    pair.submit("a", prompt(16), 2)
    pair.run()
    pair.submit("b", prompt(16), 2, cache=cache, sampling=sampling)
    pair.run()

    assert pair.done("b").timings.decode_held_tokens == 0
    assert pair.done("b").timings.transferred_tokens == 16
    pair.close()


def test_pd_11_what_the_decode_side_holds_is_no_cached_token():
    pair = SplitPair()
    pair.connect()
    pair.submit("a", prompt(16), 2)
    pair.run()
    pair.prefill.reset_peaks(clear_prefix_cache=True)
    pair.submit("b", prompt(16), 2)
    pair.run()

    assert pair.done("b").timings.decode_held_tokens == 16
    assert pair.done("b").usage.cached_tokens == 0
    assert pair.done("b").timings.computed_tokens == 16
    pair.close()


def test_only_new_blocks_are_prefaulted():
    pair = SplitPair()
    told: list[list[int]] = []
    pair.connect()
    pair.decode._kv_memory = Remembering(told)  # type: ignore[assignment]
    pair.submit("a", prompt(16), 2)
    pair.run()
    pair.submit("b", [*prompt(16), 1], 2)
    pair.run()

    assert [len(blocks) for blocks in told] == [4, 1]
    pair.decode._kv_memory = pair.memory
    pair.close()


class Remembering:
    """KV memory that notes what it is to prepare."""

    def __init__(self, told: list[list[int]]) -> None:
        self._told = told

    def prefault(self, block_ids: list[int]) -> None:
        self._told.append(list(block_ids))


def ask(pair: SplitPair, **changes: object) -> None:
    fields: dict[str, object] = {
        "request_id": "x",
        "token_ids": prompt(10),
        "block_ids": [0, 1, 2],
        "sampling": SamplingParams(),
        "cache": CacheParams(),
        "transfer_mode": "layer",
        "seed": 1,
    }
    pair.prefill.peer_message(pair.peer, Prefill(**(fields | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_held", [-4, 3, 9, 12])
def test_held_tokens_that_cannot_be_are_refused(num_held: int):
    pair = SplitPair()
    pair.connect()
    ask(pair, num_held_tokens=num_held)

    (answer,) = pair.from_prefill
    assert isinstance(answer, PrefillFailed)
    assert f"holds {num_held} tokens" in answer.message
    pair.from_prefill.clear()
    pair.close()


def test_blocks_that_another_request_has_are_never_written():
    pair = SplitPair()
    pair.connect()
    ask(pair)
    ask(pair, request_id="reads", block_ids=[5, 6, 1], num_held_tokens=0)
    ask(pair, request_id="shares", block_ids=[0, 1, 7], num_held_tokens=8)

    (answer,) = pair.from_prefill
    assert isinstance(answer, PrefillFailed)
    assert answer.request_id == "reads"
    assert "blocks [1]" in answer.message
    pair.from_prefill.clear()
    pair.close()


def test_kv_03_both_layouts_count_prompt_tokens_and_hits_alike():
    """The prefill side counts what merged counts; what the decode side held is its own figure."""
    pair = SplitPair()
    pair.connect()
    for number in range(3):
        pair.submit(f"r{number}", prompt(16) + prompt(5, seed=number + 1), 1 + number)
        pair.run()

    prefill, decode = pair.prefill.stats(), pair.decode.stats()
    assert (prefill.prefix_query_tokens, prefill.prefix_hit_tokens, prefill.prompt_tokens) == (63, 32, 63)
    assert (decode.prefix_query_tokens, decode.prefix_hit_tokens, decode.prompt_tokens) == (0, 0, 63)
    assert sum(pair.done(f"r{number}").usage.cached_tokens for number in range(3)) == prefill.prefix_hit_tokens
    assert decode.decode_held_tokens + decode.transferred_tokens == decode.prompt_tokens
    pair.close()
