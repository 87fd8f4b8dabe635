"""Requests for which there is no room, in both layouts: refused at once, served in their turn, or given up aloud."""

from __future__ import annotations

import logging

import pytest
from scripted_kv import BLOCK_SIZE, expected, prompt
from split_doubles import SplitPair

from backends.core.errors import RequestRefused


def connected(**sizes: int) -> SplitPair:
    pair = SplitPair(**sizes)
    pair.connect()
    return pair


@pytest.mark.parametrize(("decode_blocks", "prefill_blocks"), [(64, 80), (80, 64)])
def test_kv_07_a_prompt_that_fits_one_side_alone_is_refused_at_once(decode_blocks: int, prefill_blocks: int):
    """By whichever side it is too long for, and nobody waits behind it."""
    pair = connected(decode_blocks=decode_blocks, prefill_blocks=prefill_blocks)
    pair.submit("runs", prompt(20), 30)
    with pytest.raises(RequestRefused, match="can never fit") as refusal:
        pair.submit("too long", prompt(65 * BLOCK_SIZE), 4)
    pair.submit("small", prompt(5, seed=2), 4)
    pair.run()

    assert refusal.value.code == "kv_pool_too_small"
    assert pair.tokens("runs") == expected(prompt(20), 30)
    assert pair.tokens("small") == expected(prompt(5, seed=2), 4)
    pair.assert_idle()
    pair.close()


def test_kv_07_an_answer_that_outgrows_the_decode_pool_ends_by_length_and_the_small_ones_behind_it_are_served():
    """A prompt of 40 blocks and an answer of 30 in a pool of 64."""
    pair = connected(decode_blocks=64, prefill_blocks=64)
    tokens = prompt(40 * BLOCK_SIZE)
    pair.submit("large", tokens, 30 * BLOCK_SIZE)
    small = {f"small-{number}": prompt(6, seed=number + 1) for number in range(5)}
    for request_id, its_prompt in small.items():
        pair.submit(request_id, its_prompt, 4)
    pair.run()

    num_tokens = 24 * BLOCK_SIZE + 1  # the last token's KV needs no room
    assert pair.done("large").finish_reason == "length"
    assert pair.tokens("large") == expected(tokens, num_tokens)
    for request_id, its_prompt in small.items():
        assert pair.tokens(request_id) == expected(its_prompt, 4)
    pair.assert_idle()
    pair.close()


@pytest.mark.parametrize("side", ["decode", "prefill", "both"])
def test_kv_07_two_requests_of_sixty_percent_and_a_small_one_are_all_served(side: str):
    sizes = {"decode": (64, 256), "prefill": (256, 64), "both": (64, 64)}[side]
    pair = connected(decode_blocks=sizes[0], prefill_blocks=sizes[1])
    prompts = {"a": prompt(38 * BLOCK_SIZE), "b": prompt(38 * BLOCK_SIZE, seed=1), "small": prompt(5, seed=2)}
    for request_id, tokens in prompts.items():
        pair.submit(request_id, tokens, 20)
    pair.run()

    for request_id, tokens in prompts.items():
        assert pair.tokens(request_id) == expected(tokens, 20)
    pair.assert_idle()
    pair.close()


def test_kv_07_a_decode_side_that_can_not_go_on_gives_a_request_up_aloud(caplog: pytest.LogCaptureFixture):
    """Blocks that nobody gives back, as a fault of ours would lose them: the client hears of it, later ones live."""
    pair = connected(decode_blocks=8)
    pair.submit("a", prompt(12), 40)
    pair.run_until(lambda: len(pair.tokens("a")) == 3)
    pool = pair.decode_scheduler.manager.pool
    lost = pool.allocate(pool.num_free_blocks)
    assert lost is not None
    with caplog.at_level(logging.ERROR):
        pair.run()

    assert pair.failed("a").code == "internal"
    assert "could not schedule" in pair.failed("a").message
    assert "giving up request a" in caplog.text
    pool.free(lost)
    pair.submit("b", prompt(12, seed=1), 4)
    pair.run()
    assert pair.tokens("b") == expected(prompt(12, seed=1), 4)
    pair.assert_idle()
    pair.close()


def test_kv_07_a_request_for_which_the_decode_side_never_has_room_ends_by_its_handoff_s_time():
    pair = connected(decode_blocks=8, prefill_blocks=8)
    pool = pair.decode_scheduler.manager.pool
    lost = pool.allocate(6)
    assert lost is not None
    pair.submit("a", prompt(12), 4)
    pair.submit("small behind it", prompt(3, seed=1), 4)
    while pair.turn():
        pass
    assert pair.ends("a") == []
    pair.now += 101
    pair.run()

    assert pair.failed("a").code == "timeout"
    pool.free(lost)
    pair.submit("b", prompt(12, seed=1), 4)
    pair.run()
    assert pair.tokens("b") == expected(prompt(12, seed=1), 4)
    pair.assert_idle()
    pair.close()
