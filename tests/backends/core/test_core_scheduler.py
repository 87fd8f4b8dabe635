from __future__ import annotations

import pytest
from core_helpers import make_request, make_scheduler, pool_of, step, tokens_per_request

from backends.core.errors import RequestRefused
from backends.core.request import Request
from backends.core.scheduler import Scheduler
from backends.protocol.messages import CacheParams


def run_until_decoding(scheduler: Scheduler, *request_ids: str) -> None:
    for _ in range(100):
        output = step(scheduler)
        if all(tokens_per_request(output).get(request_id) == 1 for request_id in request_ids):
            return
    raise AssertionError(f"{request_ids} never decoded together")


def run_until_preempted(scheduler: Scheduler, victim: Request) -> None:
    for _ in range(100):
        step(scheduler)
        if victim.num_preemptions:
            return
    raise AssertionError(f"{victim.request_id} was never preempted")


def test_running_requests_advance_before_new_prompts():
    scheduler = make_scheduler(max_batched_tokens=8)
    scheduler.add(make_request("old", num_tokens=4))
    step(scheduler)
    scheduler.add(make_request("new", num_tokens=20))
    assert tokens_per_request(step(scheduler)) == {"old": 1, "new": 7}


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end():
    scheduler = make_scheduler(prefill_chunk_tokens=8)
    request = make_request(num_tokens=20)
    scheduler.add(request)
    seen = []
    for _ in range(4):
        output = scheduler.schedule()
        samples = [item.samples for item in output.scheduled]
        seen.append((output.scheduled[0].start, output.scheduled[0].num_tokens, samples))
        scheduler.update_from_output(output, [7 if sample else None for sample in samples])
    assert seen == [(0, 8, [False]), (8, 8, [False]), (16, 4, [True]), (20, 1, [True])]
    assert request.output_token_ids == [7, 7]
    assert request.num_computed_tokens == 21


def test_all_prompts_of_a_step_share_the_chunk_limit():
    scheduler = make_scheduler(max_batched_tokens=64, prefill_chunk_tokens=10)
    scheduler.add(make_request("a", num_tokens=6))
    scheduler.add(make_request("b", num_tokens=6))
    assert tokens_per_request(step(scheduler)) == {"a": 6, "b": 4}
    assert tokens_per_request(step(scheduler)) == {"a": 1, "b": 2}


def test_a_request_may_ask_for_smaller_chunks_of_its_own():
    scheduler = make_scheduler()
    scheduler.add(make_request("small", num_tokens=10, cache=CacheParams(chunk_size=3)))
    scheduler.add(make_request("other", num_tokens=10))
    assert tokens_per_request(step(scheduler)) == {"small": 3, "other": 10}


def test_the_token_ratio_limits_prompts_only_while_something_decodes():
    scheduler = make_scheduler(max_batched_tokens=40, prefill_chunk_tokens=40, prefill_token_ratio=0.25)
    scheduler.add(make_request("alone", num_tokens=40))
    assert tokens_per_request(step(scheduler)) == {"alone": 40}
    scheduler.add(make_request("next", num_tokens=30))
    assert tokens_per_request(step(scheduler)) == {"alone": 1, "next": 10}


@pytest.mark.parametrize("ratio", [0.0, 0.001])
def test_no_ratio_can_starve_a_prompt(ratio):
    scheduler = make_scheduler(block_size=4, max_batched_tokens=40, prefill_token_ratio=ratio)
    scheduler.add(make_request("decoding", num_tokens=4))
    step(scheduler)
    scheduler.add(make_request("prompt", num_tokens=9))
    shares = [tokens_per_request(step(scheduler))["prompt"] for _ in range(4)]
    assert shares == [4, 4, 1, 1], "one block a step, then its own decoding"


def test_an_older_prompt_leaves_room_for_newer_requests_that_decode():
    scheduler = make_scheduler(max_batched_tokens=8, prefill_chunk_tokens=8)
    scheduler.add(make_request("long", num_tokens=40, cache=CacheParams(chunk_size=4)))
    scheduler.add(make_request("short", num_tokens=4))
    step(scheduler)
    scheduler._running[0].cache = CacheParams()
    assert tokens_per_request(step(scheduler)) == {"long": 7, "short": 1}


def test_no_more_requests_run_than_allowed():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name))
    assert tokens_per_request(step(scheduler)).keys() == {"a", "b"}
    scheduler.abort("a")
    assert tokens_per_request(step(scheduler)).keys() == {"b", "c"}


def test_a_full_queue_refuses_by_name():
    scheduler = make_scheduler(max_waiting=2, max_num_seqs=1)
    for name in "abc":  # one takes the free seat, two wait
        scheduler.add(make_request(name))
    with pytest.raises(RequestRefused, match="requests are waiting") as refusal:
        scheduler.add(make_request("d"))
    assert refusal.value.code == "queue_full"
    assert scheduler.num_waiting == 3


def test_without_a_queue_free_seats_are_still_taken():
    scheduler = make_scheduler(max_waiting=0, max_num_seqs=2)
    scheduler.add(make_request("a"))
    scheduler.schedule()
    scheduler.add(make_request("b"))
    with pytest.raises(RequestRefused, match="requests are waiting"):
        scheduler.add(make_request("c"))


def test_a_prompt_that_can_never_fit_is_refused_with_both_sizes():
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    with pytest.raises(RequestRefused) as refusal:
        scheduler.add(make_request(num_tokens=65 * 4))
    assert refusal.value.code == "kv_pool_too_small"
    assert "260 tokens" in str(refusal.value)
    assert "256 tokens" in str(refusal.value)


def test_a_prompt_that_fills_the_pool_has_no_room_for_an_answer_and_one_token_less_has():
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    with pytest.raises(RequestRefused, match="can never fit"):
        scheduler.add(make_request(num_tokens=8))
    request = make_request(num_tokens=7)
    scheduler.add(request)
    step(scheduler)
    step(scheduler)
    assert len(request.output_token_ids) == 2
    assert request.num_tokens == scheduler.max_request_tokens + 1, "its engine has to end it here"
    assert step(scheduler).scheduled == (), "and the scheduler can't let it grow"


def test_the_newest_request_gives_way_and_is_admitted_again_first():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    for name in "ab":
        scheduler.add(make_request(name, num_tokens=7))
    run_until_decoding(scheduler, "a", "b")  # 2 blocks each
    scheduler.add(make_request("later", num_tokens=4))
    preempted = []
    for _ in range(8):
        output = step(scheduler)
        preempted += [request.request_id for request in output.preempted]
        if output.preempted:
            assert tokens_per_request(output) == {"a": 1}, "nothing is admitted in a step that preempts"
            break
    assert preempted == ["b"]
    assert [request.request_id for request in scheduler.requests()] == ["a", "b", "later"]


def test_the_newest_request_waits_with_its_blocks_rather_than_lose_them():
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    for name, num_tokens in [("a", 4), ("b", 7), ("newest", 6)]:  # 1 + 2 + 2 blocks, and 2 spare for a and b
        scheduler.add(make_request(name, num_tokens=num_tokens))
    for _ in range(3):
        assert "newest" in tokens_per_request(step(scheduler))
    output = step(scheduler)
    assert tokens_per_request(output) == {"a": 1, "b": 1}
    assert output.preempted == ()
    scheduler.abort("a")
    assert tokens_per_request(step(scheduler)) == {"b": 1, "newest": 1}, "it goes on where it was"


def test_a_preempted_request_returns_only_when_all_its_tokens_and_a_spare_block_fit():
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    scheduler.add(make_request("old", num_tokens=11))
    victim = make_request("victim", num_tokens=11)
    scheduler.add(victim)
    run_until_preempted(scheduler, victim)
    for _ in range(3):
        output = step(scheduler)
        assert tokens_per_request(output) == {"old": 1}
        assert output.preempted == (), "no thrash"
    scheduler.abort("old")
    assert tokens_per_request(step(scheduler)) == {"victim": 5}, "8 of its 13 tokens were still there"


def test_a_request_is_admitted_only_when_its_whole_prompt_fits():
    scheduler = make_scheduler(num_blocks=10, block_size=4, prefill_chunk_tokens=4)
    scheduler.add(make_request("first", num_tokens=24))
    scheduler.add(make_request("second", num_tokens=24))
    for _ in range(4):
        assert tokens_per_request(step(scheduler)) == {"first": 4}
    scheduler.abort("first")
    assert tokens_per_request(step(scheduler)) == {"second": 4}


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_frees_everything_in_every_state(num_steps):
    scheduler = make_scheduler(num_blocks=6, block_size=4, prefill_chunk_tokens=4)
    requests = [make_request(name, num_tokens=9) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    for _ in range(num_steps):
        step(scheduler)
    for request in requests:
        assert scheduler.abort(request.request_id) is request
        scheduler.check_integrity()
    assert pool_of(scheduler).num_blocks_in_use == 0
    assert not scheduler.has_work
    assert scheduler.abort("a") is None


def test_a_preempted_request_can_be_aborted():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    victim = make_request("victim", num_tokens=7)
    scheduler.add(make_request("old", num_tokens=7))
    scheduler.add(victim)
    run_until_preempted(scheduler, victim)
    scheduler.abort("victim")
    scheduler.abort("old")
    scheduler.check_integrity()
    assert pool_of(scheduler).num_blocks_in_use == 0


def test_a_request_computed_elsewhere_runs_at_once_in_its_reserved_blocks():
    scheduler = make_scheduler(num_blocks=10, block_size=4)
    request = make_request(num_tokens=6)
    blocks = scheduler.reserve(request)
    assert blocks is not None
    scheduler.check_integrity()
    request.num_computed_tokens = 6
    request.output_token_ids = [1]
    scheduler.add_computed(request, blocks)
    output = step(scheduler)
    assert [(item.start, item.num_tokens) for item in output.scheduled] == [(6, 1)]
    assert request.blocks == list(blocks.blocks)
    scheduler.finish(request)
    scheduler.check_integrity()
    assert pool_of(scheduler).num_blocks_in_use == 0


def test_kv_01_a_preempted_request_that_was_computed_elsewhere_recomputes_here_and_counts_no_hit():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    requests = []
    for name in "ab":
        request = make_request(name, num_tokens=7)
        blocks = scheduler.reserve(request)
        assert blocks is not None
        request.num_computed_tokens, request.output_token_ids = 7, [1]
        scheduler.add_computed(request, blocks)
        requests.append(request)
    old, victim = requests
    run_until_preempted(scheduler, victim)
    assert scheduler.reserve(make_request("new")) is None, "freed blocks go to the preempted request first"
    scheduler.finish(old)
    num_tokens = victim.num_tokens
    output = step(scheduler)
    assert output.scheduled[0].start + output.scheduled[0].num_tokens == num_tokens
    assert victim.num_tokens == num_tokens + 1
    assert victim.num_cached_tokens == 0
    assert scheduler.manager.prefix_query_tokens == 0


def test_reserved_blocks_can_be_released_and_running_requests_keep_room_to_grow():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request(num_tokens=4))
    step(scheduler)
    assert scheduler.reserve(make_request("large", num_tokens=12)) is None, (
        "1 of 3 free blocks stays for the running request"
    )
    blocks = scheduler.reserve(make_request("fits", num_tokens=8))
    assert blocks is not None
    scheduler.check_integrity()
    scheduler.release(blocks)
    scheduler.check_integrity()
    assert pool_of(scheduler).num_free_blocks == 3


def test_nothing_is_reserved_while_a_request_waits():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add(make_request(name))
    step(scheduler)
    assert scheduler.reserve(make_request("c")) is None, "there is room, but b was here first"
    scheduler.abort("b")
    assert scheduler.reserve(make_request("c")) is not None


def test_kv_07_two_requests_of_sixty_percent_and_small_ones_behind_them_are_all_served():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_batched_tokens=512, prefill_chunk_tokens=512)
    requests = [make_request("big1", num_tokens=38 * 4), make_request("big2", num_tokens=38 * 4)]
    requests += [make_request(f"small{number}", num_tokens=6) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    served = []
    for _ in range(100):
        step(scheduler)
        for request in list(scheduler.requests()):
            if len(request.output_token_ids) == 8:
                scheduler.finish(request)
                served.append(request.request_id)
    assert set(served) == {request.request_id for request in requests}
    assert scheduler.num_preemptions == 0
