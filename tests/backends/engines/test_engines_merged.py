"""The merged engine with a model that checks its own KV: the same answer whatever the schedule."""

from __future__ import annotations

import logging
import random

import pytest
from engine_doubles import (
    EOS,
    NO_TEXT,
    PagedRunner,
    ScriptedRunner,
    expected_tokens,
    make_harness,
    make_request,
)

from backends.engines.base import Engine, RequestRefused
from backends.protocol.messages import CacheParams, SamplingParams


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(num_tokens)]


def test_the_merged_engine_is_an_engine():
    engine: Engine = make_harness().engine
    assert engine.num_unfinished() == 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16, 36, 37, 38])
def test_the_answer_is_the_same_for_every_chunk_size(chunk):
    harness = make_harness(prefill_chunk_tokens=chunk)
    prompt = random_prompt(1, 37)
    harness.submit("r", prompt)
    harness.run()
    assert harness.tokens("r") == expected_tokens(prompt, 8)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_request_sets_its_own_chunk_size(chunk):
    harness = make_harness()
    harness.submit("r", random_prompt(1, 37), cache=CacheParams(chunk_size=chunk))
    harness.run()
    assert isinstance(harness.runner, PagedRunner)
    assert harness.runner.batches[0] == {"r": min(chunk, 37)}
    assert harness.tokens("r") == expected_tokens(random_prompt(1, 37), 8)


def test_the_answer_is_the_same_in_any_company():
    harness = make_harness(max_batched_tokens=24, prefill_chunk_tokens=16, prefill_token_ratio=0.4)
    prompts = {f"r{number}": random_prompt(number, 5 + 7 * number) for number in range(6)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt)
        harness.step()
    harness.run()
    for request_id, prompt in prompts.items():
        assert harness.tokens(request_id) == expected_tokens(prompt, 8)


def test_the_answer_is_the_same_from_the_prefix_cache():
    harness = make_harness()
    prompt = random_prompt(1, 33)
    for request_id, hit in [("cold", 0), ("warm", 32)]:
        harness.submit(request_id, prompt)
        harness.run()
        assert harness.done(request_id).usage.cached_tokens == hit
        assert harness.tokens(request_id) == expected_tokens(prompt, 8)


def test_a_second_turn_hits_what_the_first_generated():
    harness = make_harness(block_size=4)
    first = random_prompt(1, 10)
    harness.submit("first", first, max_tokens=9)
    harness.run()
    second = [*first, *harness.tokens("first"), *random_prompt(2, 5)]
    harness.submit("second", second)
    harness.run()
    assert harness.done("second").usage.cached_tokens == 16, "18 of 19 tokens were computed: 4 full blocks"
    assert harness.tokens("second") == expected_tokens(second, 8)


def test_kv_01_kv_10_twenty_requests_in_a_pool_for_few_answer_as_in_a_large_one_and_count_no_hits():
    harness = make_harness(num_blocks=16, block_size=4)
    prompts = {f"r{number}": random_prompt(number, 9 + number % 5) for number in range(20)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, max_tokens=24)
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert stats.prefix_hit_tokens == 0
    assert stats.prefix_query_tokens == stats.prompt_tokens == sum(map(len, prompts.values()))
    assert stats.generation_tokens == 20 * 24
    assert stats.num_blocks_in_use == 0
    for request_id, prompt in prompts.items():
        assert harness.tokens(request_id) == expected_tokens(prompt, 24)
    num_preemptions = [harness.done(request_id).timings.num_preemptions for request_id in prompts]
    assert sum(num_preemptions) == stats.num_preemptions


def test_a_digest_that_collides_costs_hits_but_never_a_wrong_token():
    harness = make_harness(digest=lambda data: bytes([sum(data) % 3]))
    shared = random_prompt(0, 16)
    prompts = [[*shared, *random_prompt(number % 3, 8 + number)] for number in range(8)]
    prompts += [random_prompt(number, 20) for number in range(8)]
    for number, prompt in enumerate(prompts * 2):
        harness.submit(f"r{number}", prompt)
        harness.run()
        assert harness.tokens(f"r{number}") == expected_tokens(prompt, 8)


def test_kv_14_salts_and_opting_out_keep_prefixes_apart():
    harness = make_harness()
    prompt = random_prompt(1, 21)
    caches = [
        ("a", CacheParams(cache_salt="x"), 0),
        ("b", CacheParams(cache_salt="y"), 0),
        ("c", CacheParams(cache_salt="x"), 20),
        ("d", CacheParams(cache_salt="x", enable_prefix_cache=False), 0),
    ]
    for request_id, cache, hit in caches:
        harness.submit(request_id, prompt, cache=cache)
        harness.run()
        assert harness.done(request_id).usage.cached_tokens == hit


def test_kv_07_a_prompt_beyond_the_pool_is_refused_and_the_next_request_works():
    harness = make_harness(num_blocks=64, block_size=4)
    with pytest.raises(RequestRefused, match="256 tokens") as refusal:
        harness.submit("too long", random_prompt(1, 65 * 4))
    assert refusal.value.code == "kv_pool_too_small"
    assert harness.said == []
    assert harness.engine.num_unfinished() == 0
    harness.submit("next", [1, 2, 3])
    harness.run()
    assert harness.tokens("next") == expected_tokens([1, 2, 3], 8)


def test_kv_07_an_answer_that_outgrows_the_pool_ends_by_length_when_it_fills_it_alone():
    harness = make_harness(num_blocks=64, block_size=4, max_batched_tokens=512, prefill_chunk_tokens=512)
    prompt = random_prompt(1, 40 * 4)
    harness.submit("big", prompt, max_tokens=30 * 4)
    small = [harness.submit(f"small{number}", random_prompt(number + 2, 6)) for number in range(5)]
    harness.run()
    done = harness.done("big")
    assert done.finish_reason == "length"
    assert done.usage.completion_tokens == 24 * 4 + 1, "the last token's KV needs no room"
    assert harness.tokens("big") == expected_tokens(prompt, 24 * 4 + 1)
    assert done.timings.peak_kv_blocks == {"merged": 64}
    for request in small:
        assert harness.tokens(request.request_id) == expected_tokens(request.prompt_token_ids, 8)


def test_kv_07_two_requests_that_each_need_most_of_the_pool_both_finish():
    harness = make_harness(num_blocks=64, block_size=4)
    prompts = {"a": random_prompt(1, 80), "b": random_prompt(2, 80)}  # 20 blocks, growing to 38
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt, max_tokens=18 * 4)
    harness.submit("small", [1, 2, 3])
    harness.run()
    for request_id, prompt in prompts.items():
        assert harness.done(request_id).finish_reason == "length"
        assert harness.tokens(request_id) == expected_tokens(prompt, 18 * 4)
    assert harness.done("small").usage.completion_tokens == 8


@pytest.mark.parametrize("num_lost", [8, 7])
def test_kv_07_an_engine_that_can_not_go_on_gives_a_request_up_aloud(num_lost, caplog):
    """Blocks that nobody gives back, as a fault of ours would lose them: one waits at the door, one runs on a last
    block. Both clients hear of it, and the next one is answered."""
    harness = make_harness(num_blocks=8, block_size=4)
    pool = harness.scheduler.manager.pool
    lost = pool.allocate(num_lost)
    harness.submit("first", random_prompt(1, 3))
    harness.submit("second", random_prompt(2, 9))
    with caplog.at_level(logging.ERROR):
        for _ in range(30):
            harness.engine.step()
    for request_id in ("first", "second"):
        assert harness.failed(request_id).code == "internal"
        assert "could not schedule" in harness.failed(request_id).message
        assert f"giving up request {request_id}" in caplog.text
    assert harness.engine.num_unfinished() == 0
    pool.free(lost)
    harness.submit("next", [1, 2, 3])
    harness.run()
    assert harness.tokens("next") == expected_tokens([1, 2, 3], 8)


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_at_any_step_frees_all_and_leaves_the_others_alone(num_steps):
    harness = make_harness(num_blocks=12, block_size=4, prefill_chunk_tokens=6)
    prompts = {"stays": random_prompt(1, 20), "goes": random_prompt(2, 20)}
    for request_id, prompt in prompts.items():
        harness.submit(request_id, prompt)
    for _ in range(num_steps):
        harness.step()
    harness.engine.abort("goes")
    harness.scheduler.check_integrity()
    num_said = len(harness.kinds("goes"))
    harness.run()
    assert len(harness.kinds("goes")) == num_said, "nothing more is said of it"
    assert harness.tokens("stays") == expected_tokens(prompts["stays"], 8)
    assert harness.engine.stats().num_blocks_in_use == 0
    harness.engine.abort("unknown")


def test_a_failing_step_costs_its_requests_and_not_the_engine():
    harness = make_harness(max_num_seqs=2)
    for request_id in ("a", "b", "waits"):
        harness.submit(request_id, random_prompt(1, 10))
    harness.step()
    assert isinstance(harness.runner, PagedRunner)
    harness.runner.fail_next = True
    harness.step()
    for request_id in ("a", "b"):
        assert harness.failed(request_id).code == "internal"
        assert "on fire" in harness.failed(request_id).message
    harness.run()
    assert harness.tokens("waits") == expected_tokens(random_prompt(1, 10), 8)
    assert harness.engine.stats().num_blocks_in_use == 0


def test_a_runner_that_samples_where_it_should_not_is_a_failed_step():
    class Eager(ScriptedRunner):
        def execute(self, scheduled, *, on_layer=None):
            return [1 for _ in scheduled]

    harness = make_harness(runner=Eager({}), prefill_chunk_tokens=4)
    harness.submit("r", random_prompt(1, 10))
    harness.run()
    assert harness.failed("r").code == "internal"


def test_an_answer_whose_text_cannot_be_made_fails_alone():
    harness = make_harness(runner=ScriptedRunner({"bad": [97, NO_TEXT], "good": [97, 98]}))
    harness.submit("bad", [1], max_tokens=2)
    harness.submit("good", [1], max_tokens=2)
    harness.run()
    assert harness.failed("bad").code == "internal"
    assert harness.text("good") == "ab"
    assert harness.engine.stats().num_blocks_in_use == 0


@pytest.mark.parametrize("num_steps", [0, 2, 4])
def test_a_request_past_its_deadline_fails_in_every_state(num_steps):
    harness = make_harness(prefill_chunk_tokens=4)
    harness.submit("slow", random_prompt(1, 10), deadline_at=5.0)
    harness.submit("other", random_prompt(2, 10))
    for _ in range(num_steps):
        harness.step()
    assert harness.engine.next_deadline() == 5.0
    harness.clock.now = 5.0
    harness.step()
    assert harness.failed("slow").code == "timeout"
    assert "5 seconds" in harness.failed("slow").message
    assert harness.engine.next_deadline() is None
    harness.run()
    assert harness.tokens("other") == expected_tokens(random_prompt(2, 10), 8)
    assert harness.engine.stats().num_blocks_in_use == 0


def test_ids_in_use_and_empty_prompts_are_refused():
    harness = make_harness()
    harness.submit("r", [1])
    with pytest.raises(RequestRefused, match="in use"):
        harness.submit("r", [1])
    with pytest.raises(RequestRefused, match="empty"):
        harness.submit("empty", [])
    harness.run()
    assert harness.kinds("r")[-1] == "Done"


def test_an_idle_engine_has_nothing_to_do():
    harness = make_harness()
    assert harness.engine.step() is False
    assert harness.engine.next_deadline() is None


def test_a_closed_engine_holds_nothing_and_says_nothing_more():
    harness = make_harness()
    harness.submit("r", [1, 2])
    harness.step()
    num_said = len(harness.said)
    harness.engine.close()
    assert harness.engine.num_unfinished() == 0
    assert harness.engine.stats().num_blocks_in_use == 0
    assert len(harness.said) == num_said


def test_acceptance_comes_first_and_carries_the_notices():
    harness = make_harness()
    harness.submit("r", [1, 2, 3], max_tokens=2, notices=("said so",))
    harness.run()
    assert harness.kinds("r") == ["Accepted", "TokenChunk", "TokenChunk", "Done"]
    accepted = harness.accepted("r")
    assert (accepted.prompt_tokens, accepted.max_tokens, accepted.notices) == (3, 2, ("said so",))


def test_every_phase_of_a_request_is_timed():
    harness = make_harness(prefill_chunk_tokens=4)
    harness.submit("r", random_prompt(1, 12), max_tokens=3)
    harness.clock.now = 1.0
    harness.step()  # scheduled at 1, not done
    harness.clock.now = 2.0
    harness.step()
    harness.clock.now = 4.0
    harness.step()  # first token at 4
    harness.clock.now = 7.0
    harness.run()  # two more, the last at 7
    timings = harness.done("r").timings
    assert (timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds) == (1.0, 3.0, 3.0)
    assert timings.peak_kv_blocks == {"merged": 4}
    assert timings.peak_memory_bytes == {"merged": 2000}
    assert timings.num_preemptions == 0
    assert timings.transfer_bytes == 0


def test_a_request_remembers_the_most_blocks_in_use_while_it_lived():
    harness = make_harness(block_size=4)
    harness.submit("big", random_prompt(1, 40), max_tokens=2)
    harness.submit("small", random_prompt(2, 4), max_tokens=8)
    harness.run()
    harness.submit("later", random_prompt(3, 4), max_tokens=1)
    harness.run()
    assert harness.done("small").timings.peak_kv_blocks == {"merged": 13}
    assert harness.done("later").timings.peak_kv_blocks == {"merged": 1}
    assert harness.engine.stats().peak_blocks_in_use == 13


def test_new_peaks_and_a_cleared_cache_on_request():
    harness = make_harness()
    prompt = random_prompt(1, 20)
    harness.submit("first", prompt)
    harness.run()
    harness.engine.reset_peaks(clear_prefix_cache=False)
    assert harness.engine.stats().peak_blocks_in_use == 0
    assert harness.engine.stats().num_blocks_cached > 0
    harness.engine.reset_peaks(clear_prefix_cache=True)
    assert harness.engine.stats().num_blocks_cached == 0
    assert harness.memory.num_resets == 2
    harness.submit("second", prompt)
    harness.run()
    assert harness.done("second").usage.cached_tokens == 0


def test_stats_show_what_runs_and_what_waits():
    harness = make_harness(max_num_seqs=1)
    for request_id in "abc":
        harness.submit(request_id, [1, 2, 3])
    harness.step()
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_in_use, stats.num_steps) == (1, 2, 1, 1)
    assert (stats.memory_bytes, stats.peak_memory_bytes) == (1000, 2000)


def test_an_end_mark_has_no_text_but_is_counted_and_told():
    harness = make_harness(runner=ScriptedRunner({"r": [97, 98, EOS]}))
    harness.submit("r", [1])
    harness.run()
    done = harness.done("r")
    assert (done.finish_reason, done.stop_reason) == ("stop", None)
    assert done.usage.completion_tokens == 3
    assert harness.tokens("r") == [97, 98, EOS]
    assert harness.text("r") == "ab"


def test_mt_05_a_hundred_blanks_are_a_hundred_tokens():
    harness = make_harness(runner=ScriptedRunner({"r": [ord(" ")] * 100}))
    harness.submit("r", [1], max_tokens=100)
    harness.run()
    assert harness.text("r") == " " * 100
    assert harness.done("r").usage.completion_tokens == 100
    assert harness.engine.stats().generation_tokens == 100


def test_a_stop_token_of_the_request_is_named():
    harness = make_harness(runner=ScriptedRunner({"r": [97, 98, 99]}))
    harness.submit("r", [1], sampling=SamplingParams(stop_token_ids=(98,)))
    harness.run()
    assert (harness.done("r").finish_reason, harness.done("r").stop_reason) == ("stop", 98)
    assert harness.text("r") == "a"


def test_a_stop_string_over_several_tokens_is_never_told():
    harness = make_harness(runner=ScriptedRunner({"r": [ord(letter) for letter in "abcdef"]}))
    harness.submit("r", [1], sampling=SamplingParams(stop=("cd",)))
    harness.run()
    assert harness.text("r") == "ab"
    assert (harness.done("r").finish_reason, harness.done("r").stop_reason) == ("stop", "cd")
    assert harness.done("r").usage.completion_tokens == 4


def test_text_held_back_for_a_stop_string_comes_with_the_end():
    harness = make_harness(runner=ScriptedRunner({"r": [ord(letter) for letter in "abc"]}))
    harness.submit("r", [1], max_tokens=3, sampling=SamplingParams(stop=("cd",)))
    harness.run()
    assert harness.done("r").text == "c"
    assert harness.done("r").finish_reason == "length"


def test_a_request_with_two_end_conditions_at_once_stopped():
    harness = make_harness(runner=ScriptedRunner({"r": [97, EOS], "s": [97, 98]}))
    harness.submit("r", [1], max_tokens=2)
    harness.submit("s", [1], max_tokens=2, sampling=SamplingParams(stop=("b",)))
    harness.run()
    assert harness.done("r").finish_reason == "stop"
    assert harness.done("s").finish_reason == "stop"


def test_a_refused_detokenizer_leaves_nothing_behind():
    harness = make_harness()
    harness.engine._outputs._detokenizer_factory = _no_detokenizer
    with pytest.raises(RuntimeError):
        harness.engine.submit(make_request("r", [1]))
    assert harness.engine.num_unfinished() == 0
    assert not harness.scheduler.has_work


def _no_detokenizer(request):
    raise RuntimeError("no detokenizer")
