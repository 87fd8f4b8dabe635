"""Percentiles, bootstrap, workload, event parsing: facts that need no gateway."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.bench.answer import AnswerReader
from gateway.bench.bootstrap import MIN_PAIRS, paired_difference
from gateway.bench.options import CompareOptions
from gateway.bench.percentiles import percentile, percentile_or_none
from gateway.bench.sse import SseEvent, SseParser
from gateway.bench.workload import mode_order, plan_round, plan_warm_up, token_id_range
from gateway.core.types import CacheMode

MERGED, SPLIT = CacheMode.MERGED, CacheMode.SPLIT


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 95, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 95, 48.0),  # numpy.percentile gives the same
        ([1.0, 2.0, 3.0, 4.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 100, 4.0),
        ([0.0, 10.0], 25, 2.5),
    ],
)
def test_a_percentile_interpolates_between_the_nearest_ranks(values, share, expected):
    assert percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "share"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_of_nothing_or_of_a_bad_share_is_refused(values, share):
    with pytest.raises(ValueError, match=r"percentile|share"):
        percentile(values, share)


def test_unknown_values_are_left_out_of_a_percentile():
    assert percentile_or_none([None, 3.0, None, 1.0], 50) == 2.0
    assert percentile_or_none([None], 50) is None


@settings(derandomize=True, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_stay_within_the_values_and_never_fall_with_the_share(values, one, two):
    low, high = sorted((one, two))
    slack = 1e-6

    assert min(values) - slack <= percentile(values, low) <= percentile(values, high) + slack
    assert percentile(values, high) <= max(values) + slack


def test_a_shift_of_every_pair_is_a_clear_difference():
    pairs = [(float(i), i + 10.0) for i in range(8)]

    difference = paired_difference(pairs, mean, seed=1)

    assert difference is not None
    assert (difference.value, difference.num_pairs, difference.is_clear) == (10.0, 8, True)
    assert difference.low == pytest.approx(10.0)
    assert difference.high == pytest.approx(10.0)


def test_noise_around_zero_is_no_clear_difference():
    pairs = [(0.0, 1.0), (0.0, -1.0)] * 5

    difference = paired_difference(pairs, mean, seed=1)

    assert difference is not None
    assert difference.low is not None
    assert difference.high is not None
    assert difference.low < 0 < difference.high
    assert not difference.is_clear


def test_an_interval_is_the_same_for_the_same_seed_and_another_for_another():
    pairs = [(float(i), float(i * i % 7)) for i in range(9)]

    assert paired_difference(pairs, mean, seed=3) == paired_difference(pairs, mean, seed=3)
    assert paired_difference(pairs, mean, seed=3) != paired_difference(pairs, mean, seed=4)


def test_pairs_stay_together_in_every_draw():
    pairs = [(float(i * 100), i * 100 + 1.0) for i in range(10)]  # unpaired draws would differ by hundreds

    difference = paired_difference(pairs, mean, seed=0)

    assert difference is not None
    assert difference.low == pytest.approx(1.0)
    assert difference.high == pytest.approx(1.0)


def test_too_few_pairs_give_a_difference_without_an_interval():
    difference = paired_difference([(1.0, 3.0)] * (MIN_PAIRS - 1), mean, seed=0)

    assert difference is not None
    assert (difference.value, difference.low, difference.high, difference.is_clear) == (2.0, None, None, False)
    assert paired_difference([], mean, seed=0) is None


def bodies(options, round_index=0):
    return [msgspec.json.decode(p.body) for p in plan_round(options, "m", round_index, token_id_range(None))]


def test_prompts_have_exactly_the_length_asked_and_safe_ids():
    planned = bodies(CompareOptions(prompt_tokens=300, num_requests=3))

    assert [len(body["prompt"]) for body in planned] == [300] * 3
    assert all(1000 <= token_id < 9000 for body in planned for token_id in body["prompt"])


def test_the_same_options_give_the_same_bytes_and_another_seed_gives_others():
    one, other = CompareOptions(seed=1), CompareOptions(seed=2)
    ids = token_id_range(None)

    assert plan_round(one, "m", 0, ids) == plan_round(one, "m", 0, ids)
    assert plan_round(one, "m", 0, ids) != plan_round(other, "m", 0, ids)


def test_no_two_requests_of_a_comparison_share_a_prompt():
    options = CompareOptions(num_requests=4)
    prompts = [body["prompt"] for round_index in range(3) for body in bodies(options, round_index)]
    prompts.append(msgspec.json.decode(plan_warm_up(options, "m", 0, token_id_range(None)).body)["prompt"])

    assert len({tuple(prompt) for prompt in prompts}) == 13


def test_every_answer_is_greedy_of_fixed_length_and_counted_by_usage():
    (body,) = bodies(CompareOptions(num_requests=1, output_tokens=9))

    assert body["model"] == "m"
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_prompts_from_a_file_differ_in_their_first_line_only():
    one, two = bodies(CompareOptions(num_requests=2, prompt_text="Once\nupon"))

    assert one["prompt"].split("\n", 1)[1] == two["prompt"].split("\n", 1)[1] == "Once\nupon"
    assert one["prompt"] != two["prompt"]


@pytest.mark.parametrize(("vocab_size", "expected"), [(None, range(1000, 9000)), (49152, range(1000, 9000)),
                                                      (5000, range(1000, 5000)), (128, range(64, 128))])  # fmt: skip
def test_token_ids_stay_inside_the_vocabulary(vocab_size, expected):
    assert token_id_range(vocab_size) == expected


def test_the_order_of_modes_alternates_between_rounds():
    assert [mode_order((MERGED, SPLIT), i) for i in range(3)] == [[MERGED, SPLIT], [SPLIT, MERGED], [MERGED, SPLIT]]
    assert [mode_order((SPLIT, MERGED), i) for i in range(2)] == [[SPLIT, MERGED], [MERGED, SPLIT]]


STREAM = (
    b": comment\r\n\r\nevent: error\r\ndata: one\r\ndata: two\r\n\r\n"
    b"data:three\n\nid: 4\n\ndata: {\xc3\xa4}\r\rdata: lost"
)
EVENTS = [SseEvent("one\ntwo", "error"), SseEvent("three"), SseEvent("{ä}")]


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_network_cuts_them(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()

    events = [event for start, stop in itertools.pairwise(edges) for event in parser.feed(STREAM[start:stop])]

    assert events == EVENTS


def chunk(**choice):
    return SseEvent(msgspec.json.encode({"choices": [choice]}).decode())


def test_role_empty_text_and_usage_are_no_first_token():
    reader = AnswerReader()
    reader.take(chunk(delta={"role": "assistant"}), 0.0)
    reader.take(chunk(delta={"content": ""}), 0.01)
    reader.take(chunk(text=""), 0.02)
    reader.take(SseEvent('{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}'), 0.03)
    assert reader.first_at is None

    reader.take(chunk(delta={"content": "Hi"}), 0.5)

    assert reader.first_at == 0.5


@pytest.mark.parametrize("delta", [{"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_first_tokens(delta):
    reader = AnswerReader()
    reader.take(chunk(delta=delta), 0.25)

    assert reader.first_at == 0.25


def test_a_chunk_that_is_no_json_is_an_error():
    reader = AnswerReader()
    reader.take(SseEvent("{oops"), 0.0)

    assert reader.error is not None
    assert "can't be read" in reader.error
