"""Several prefill and several decode sides: who computes what, and what happens when one of them hangs or dies."""

from collections.abc import Iterator

import pytest
from scripted_kv import expected, prompt
from split_doubles import SplitFleet

from backends.core.errors import RequestRefused
from backends.engines.split.handoff import MAX_FAILOVERS, Phase
from backends.protocol.messages import Prefill


@pytest.fixture
def fleet() -> Iterator[SplitFleet]:
    made = SplitFleet(num_prefills=2, num_decodes=2, chunk=4)
    made.connect()
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[SplitFleet]:
    """Two prefill sides, one decode side."""
    made = SplitFleet(num_prefills=2, chunk=4)
    made.connect()
    yield made
    made.close()


def asked(fleet: SplitFleet, number: int) -> list[str]:
    """What prefill side `number` was told to compute and hasn't read yet."""
    return [
        message.request_id
        for wire in fleet.wires_of(fleet.prefills[number])
        for message in wire.to_prefill
        if isinstance(message, Prefill)
    ]


def test_pd_07_two_prefill_and_two_decode_sides_answer_as_the_reference_does(fleet: SplitFleet):
    prompts = {f"r{i}": prompt(5 + 3 * i, seed=i % 5) for i in range(16)}
    for number, (request_id, tokens) in enumerate(prompts.items()):
        fleet.submit(request_id, tokens, 6, to=number % 2)
    fleet.run()

    for request_id, tokens in prompts.items():
        assert fleet.tokens(request_id) == expected(tokens, 6), request_id
    assert all(prefill.runner.chunks for prefill in fleet.prefills)
    fleet.assert_idle()


def test_two_decode_sides_may_use_the_same_request_id(fleet: SplitFleet):
    for to in range(2):
        fleet.submit("same", prompt(9, seed=to), 5, to=to)
    fleet.run()

    assert fleet.tokens("same") == expected(prompt(9, seed=0), 5) + expected(prompt(9, seed=1), 5)
    fleet.assert_idle()


def test_prompts_are_spread_over_the_prefill_sides_by_their_load(two: SplitFleet):
    two.submit("long", prompt(40, seed=1))
    for number in range(3):
        two.submit(f"short{number}", prompt(10, seed=2 + number))

    assert asked(two, 0) == ["long"]
    assert asked(two, 1) == ["short0", "short1", "short2"]
    two.run()
    two.assert_idle()


def test_a_conversation_goes_on_where_it_was_computed(two: SplitFleet):
    two.submit("x", prompt(9, seed=1), 2)
    two.submit("a", prompt(24), 2)
    two.run()
    turn = prompt(24) + two.tokens("a") + prompt(6, seed=3)
    two.submit("b", turn, 2)
    two.run()

    assert two.done("b").usage.cached_tokens == 24
    assert two.tokens("b") == expected(turn, 2)
    two.assert_idle()


def test_the_death_of_one_prefill_side_sends_its_prompts_to_the_other(two: SplitFleet):
    two.submit("a", prompt(11), 4)
    two.submit("b", prompt(11, seed=1), 4)
    assert (asked(two, 0), asked(two, 1)) == (["a"], ["b"])
    two.deliver()
    two.prefills[0].engine.step()
    two.kill_prefill(0)

    assert asked(two, 1) == ["a"]
    two.run()
    for seed, request_id in enumerate("ab"):
        assert two.tokens(request_id) == expected(prompt(11, seed=seed), 4)
    two.assert_idle()


def test_a_hung_prefill_side_costs_no_request_and_keeps_its_blocks_until_its_end(two: SplitFleet):
    two.submit("a", prompt(11), 4)
    two.deliver()
    two.prefills[0].engine.step()  # some of its KV is written
    two.hang_prefill(0)
    two.run_until(lambda: bool(two.ends("a")))

    assert two.tokens("a") == expected(prompt(11), 4)
    decode = two.decodes[0]
    assert decode.engine.stats().num_blocks_in_use == 3  # what the hung side may still write to
    assert decode.engine.num_unfinished() == 1
    decode.scheduler.check_integrity()
    two.kill_prefill(0)
    two.assert_idle()


def test_a_hung_prefill_side_fails_at_once_what_has_nowhere_else_to_go():
    fleet = SplitFleet(chunk=4, decode_blocks=9)
    fleet.connect()
    fleet.submit("a", prompt(15), 4)
    fleet.submit("b", prompt(15, seed=1), 4)
    fleet.submit("c", prompt(15, seed=2), 4)  # no room: it waits on the decode side
    fleet.deliver()
    fleet.hang_prefill()

    for request_id in "abc":
        assert fleet.failed(request_id).code == "peer_lost"
        assert "does not answer (it said nothing for 10 seconds)" in fleet.failed(request_id).message
    with pytest.raises(RequestRefused, match="being restarted"):
        fleet.submit("d", prompt(3))
    assert fleet.decodes[0].engine.stats().num_blocks_in_use == 8
    fleet.kill_prefill()
    fleet.assert_idle()
    fleet.connect()
    fleet.submit("d", prompt(3), 2)
    fleet.run()
    assert fleet.tokens("d") == expected(prompt(3), 2)
    fleet.close()


def test_a_hung_side_that_wakes_up_gives_its_blocks_back_and_changes_no_answer(two: SplitFleet):
    two.submit("a", prompt(11), 4)
    two.deliver()
    two.hang_prefill(0)
    two.run_until(lambda: bool(two.ends("a")))
    hung = two.wires_of(two.prefills[0])[0]
    hung.frozen = False  # it computes what it was asked for and says so

    two.run_until(lambda: two.decodes[0].engine.num_unfinished() == 0)
    assert two.tokens("a") == expected(prompt(11), 4)
    assert len(two.ends("a")) == 1
    two.submit("b", prompt(9, seed=5), 2)
    assert asked(two, 0) == []  # it isn't asked again before it was connected again
    two.run()
    two.assert_idle()


@pytest.mark.parametrize("when", ["queued", "computing", "decoding"])
def test_an_abort_after_a_failover_leaves_nothing(two: SplitFleet, when: str):
    two.submit("a", prompt(11), 9)
    two.deliver()
    two.hang_prefill(0)
    if when != "queued":
        two.deliver()
        two.prefills[1].engine.step()
    if when == "decoding":
        two.run_until(lambda: bool(two.tokens("a")))
    two.decodes[0].engine.abort("a")
    two.kill_prefill(0)
    two.run()

    assert two.ends("a") == []
    two.assert_idle()


def test_a_prompt_that_kills_each_side_is_given_up_and_the_last_side_lives():
    fleet = SplitFleet(num_prefills=MAX_FAILOVERS + 2)
    fleet.connect()
    fleet.submit("poison", prompt(5), 4)
    for _ in range(MAX_FAILOVERS + 1):
        (victim,) = [number for number in range(len(fleet.prefills)) if asked(fleet, number)]
        fleet.kill_prefill(victim)

    assert fleet.failed("poison").code == "peer_lost"
    fleet.submit("b", prompt(5), 2)
    fleet.run()
    assert fleet.tokens("b") == expected(prompt(5), 2)
    fleet.assert_idle()
    fleet.close()


def test_a_prompt_goes_only_where_it_fits():
    fleet = SplitFleet(num_prefills=2)
    fleet.prefills[0].engine._info = fleet.prefills[0].engine.info.__class__(  # a smaller pool than it really has
        **{
            name: getattr(fleet.prefills[0].engine.info, name)
            for name in fleet.prefills[0].engine.info.__struct_fields__
        }
        | {"num_blocks": 2}
    )
    fleet.connect()
    fleet.submit("a", prompt(12), 2)
    assert (asked(fleet, 0), asked(fleet, 1)) == ([], ["a"])
    fleet.kill_prefill(1)

    assert fleet.failed("a").code == "kv_pool_too_small"
    fleet.submit("b", prompt(7), 2)
    fleet.run()
    assert fleet.tokens("b") == expected(prompt(7), 2)
    fleet.assert_idle()
    fleet.close()


def test_the_death_of_one_decode_side_disturbs_no_other(fleet: SplitFleet):
    for to in range(2):
        fleet.submit(f"r{to}", prompt(13, seed=to), 5, to=to)
        fleet.submit(f"s{to}", prompt(10, seed=5 + to), 5, to=to)
    fleet.deliver()
    for prefill in fleet.prefills:
        prefill.engine.step()
    fleet.kill_decode(1)
    fleet.run_until(lambda: fleet.decodes[0].engine.num_unfinished() == 0)

    assert fleet.tokens("r0") == expected(prompt(13, seed=0), 5)
    assert fleet.tokens("s0") == expected(prompt(10, seed=5), 5)
    for prefill in fleet.prefills:
        assert prefill.engine.num_unfinished() == 0
        assert prefill.engine.stats().num_blocks_in_use == 0
        prefill.scheduler.check_integrity()


def test_a_restarted_decode_side_finds_the_prefix_cache_as_it_was():
    fleet = SplitFleet(num_decodes=2)
    fleet.connect()
    fleet.submit("a", prompt(20), 2, to=0)
    fleet.run()
    fleet.kill_decode(0)
    fleet.submit("b", prompt(20), 2, to=1)  # a new one with nothing of its own
    fleet.run()

    assert fleet.done("b").usage.cached_tokens == 16
    assert fleet.done("b").timings.decode_held_tokens == 0
    fleet.close()


def test_a_restarted_prefill_side_finds_a_decode_side_that_kept_its_answers_and_blocks():
    fleet = SplitFleet()
    fleet.connect()
    fleet.submit("runs", prompt(12), 20)
    fleet.submit("over", prompt(20, seed=1), 2)
    fleet.run_until(lambda: bool(fleet.ends("over")))
    fleet.kill_prefill()
    fleet.prefills[0].engine.reset_peaks(clear_prefix_cache=True)  # a new process knows nothing
    fleet.connect()
    fleet.submit("again", prompt(20, seed=1), 2)
    fleet.run()

    assert fleet.tokens("runs") == expected(prompt(12), 20)
    assert fleet.done("again").usage.cached_tokens == 0
    assert fleet.done("again").timings.decode_held_tokens == 20
    assert fleet.done("again").timings.transfer_bytes == 0
    fleet.assert_idle()
    fleet.close()


def test_timings_are_on_one_clock_and_add_up(two: SplitFleet):
    two.submit("a", prompt(11), 4)
    two.run()

    timings = two.done("a").timings
    assert 0.0 <= timings.slot_wait_seconds <= timings.queue_seconds
    assert timings.first_decode_step_seconds > 0.0
    assert timings.first_decode_step_seconds + timings.decode_wait_seconds <= timings.decode_seconds + 1e-3
    assert timings.prefill_hit_tokens + timings.computed_tokens == 11
    assert timings.decode_held_tokens + timings.transferred_tokens == 11


def test_the_wait_for_a_decode_slot_is_told():
    fleet = SplitFleet(decode_seqs=1)
    fleet.connect()
    fleet.submit("a", prompt(5), 4)
    fleet.submit("b", prompt(5, seed=1), 4)
    fleet.now += 7.0  # of the decode side alone
    fleet.run()

    assert fleet.done("b").timings.slot_wait_seconds >= 7.0
    assert fleet.done("a").timings.slot_wait_seconds < 7.0
    fleet.close()


def test_pd_02_a_burst_beyond_the_capacity_is_refused_or_ends_by_the_deadline_and_nothing_hangs():
    """64 requests for 4 places while the prefill side is stuck."""
    fleet = SplitFleet(decode_seqs=4, max_waiting=8, timeout_seconds=5.0)
    fleet.connect()
    refused = []
    for number in range(64):
        try:
            fleet.submit(f"r{number}", prompt(6, seed=number), 3)
        except RequestRefused as refusal:
            refused.append(refusal.code)
    assert refused == ["queue_full"] * 52

    fleet.now += 5.1
    engine = fleet.decodes[0].engine
    assert engine.next_deadline() is not None
    engine.step()
    assert [fleet.failed(f"r{number}").code for number in range(12)] == ["timeout"] * 12
    assert engine._handoff.count(Phase.WAITING) == 0
    assert engine._handoff.count(Phase.CANCELLING) == 4  # until the stuck side answers, or dies
    fleet.run()
    fleet.assert_idle()

    fleet.submit("after", prompt(6), 3)
    fleet.run()
    assert fleet.tokens("after") == expected(prompt(6), 3)
    fleet.close()
